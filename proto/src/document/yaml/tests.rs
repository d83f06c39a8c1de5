//! Nodes and the places of values in the text.

use super::*;

const KIND: Kind = Kind {
    example: "x.yaml",
    least: "",
};

const TEXT: &str = "\
# a comment with models: in it
listen: 'x'
models:
  - name: a
    endpoints:
      - {url: \"u, {\", slots: 4}   # flow inside block
      - url: v
        slots: &four 5
  - { name: b,
      aliases: [c, d] }
é: {key: [1, *four]}
x: 1
x: 2
";

fn place(steps: &[Step]) -> Place {
    Place {
        steps: steps.to_vec(),
        at: At::Value,
    }
}

fn key(name: &str) -> Step {
    Step::Key(name.to_owned(), 0)
}

#[test]
fn a_path_is_found_in_block_and_flow_style() {
    let index = Step::Index;
    let cases = [
        (place(&[key("listen")]), (2, 9)),
        (place(&[key("listen")]).at_key(), (2, 1)),
        (place(&[key("models"), index(0), key("name")]), (4, 11)),
        (place(&[key("models"), index(0)]), (4, 5)),
        (
            place(&[
                key("models"),
                index(0),
                key("endpoints"),
                index(0),
                key("slots"),
            ]),
            (6, 30),
        ),
        (
            place(&[
                key("models"),
                index(0),
                key("endpoints"),
                index(1),
                key("slots"),
            ])
            .at_key(),
            (8, 9),
        ),
        (
            place(&[key("models"), index(1), key("aliases"), index(1)]),
            (10, 20),
        ),
        (place(&[key("é"), key("key"), index(0)]), (11, 11)),
        (place(&[Step::Key("x".to_owned(), 1)]), (13, 4)),
    ];
    for (place, expected) in cases {
        assert_eq!(position(TEXT, &place), Some(expected), "{place}");
    }
}

#[test]
fn a_path_that_is_not_there_gives_the_nearest_value_around_it() {
    let missing = place(&[key("models"), Step::Index(0), key("source"), key("x")]);
    assert_eq!(position(TEXT, &missing), Some((4, 5)));
}

#[test]
fn duplicate_keys_are_kept() {
    let Node::Mapping(entries) = parse(Path::new("f"), TEXT, &KIND).unwrap() else {
        panic!()
    };
    let xs: Vec<&Node> = entries
        .iter()
        .filter(|(key, _)| *key == Node::Text("x".to_owned()))
        .map(|(_, value)| value)
        .collect();
    assert_eq!(xs, [&Node::Integer(1), &Node::Integer(2)]);
}
