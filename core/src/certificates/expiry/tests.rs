//! What is said of an end, and how often, on a clock of the test's own.

use super::super::tests::{Make, NOW};
use super::*;

const HOUR: i64 = 3_600;

fn ends(owner: Owner, from_days: i64, until_days: i64) -> Ends {
    let make = Make {
        serial: 0xa5,
        from_days,
        until_days,
        ..Make::default()
    };
    Ends::of(owner, &make.read())
}

fn shown() -> Owner {
    Owner::Shown(Use::Listen, PathBuf::from("/tls/server.pem"))
}

#[test]
fn an_end_is_warned_of_from_30_days_before_and_is_an_error_once_it_came() {
    // Seconds from now; days until the end, then what is said.
    let cases = [
        (0, 31, None),
        (DAY_SECONDS - 1, 31, None),
        (
            0,
            30,
            Some((Level::WARN, "expires in 30 days, at 2027-02-14T08:00:00Z")),
        ),
        (0, 1, Some((Level::WARN, "expires in 1 day, at "))),
        (HOUR, 1, Some((Level::WARN, "expires in less than a day"))),
        (
            DAY_SECONDS,
            1,
            Some((Level::WARN, "expires in less than a day")),
        ),
        (
            DAY_SECONDS + 1,
            1,
            Some((
                Level::ERROR,
                "expired at 2027-01-16T08:00:00Z, and this machine's clock says 2027-01-16T08:00:01Z: \
                 `llmgw ctl cert renew /tls/server.pem --ca DIR` makes it last longer, unless the clock is wrong",
            )),
        ),
        (
            -2 * DAY_SECONDS,
            90,
            Some((
                Level::ERROR,
                "is not valid before 2027-01-14T08:00:00Z, and this machine's clock says 2027-01-13T08:00:00Z",
            )),
        ),
    ];
    for (after, until_days, expected) in cases {
        let said = ends(shown(), -1, until_days).remark(NOW.after(after));
        match (said, expected) {
            (None, None) => {}
            (Some((level, said)), Some((wanted, what))) => {
                assert_eq!(level, wanted, "{said}");
                assert!(said.contains(what), "{said}");
                let start = "`listen.tls`: /tls/server.pem: the certificate with serial a5 ";
                assert!(said.starts_with(start), "{said}");
            }
            (said, _) => panic!("{said:?} at {after} with {until_days}"),
        }
    }
    let node = ends(Owner::Node("gpu-1".to_owned()), -1, 3);
    let (_, said) = node.remark(NOW).unwrap();
    assert!(said.starts_with("node `gpu-1`: "), "{said}");
    let trusted = ends(Owner::Trusted(PathBuf::from("ca.pem")), -1, 3);
    let (_, said) = trusted.remark(NOW).unwrap();
    assert!(said.starts_with("`agents.tls.ca`: ca.pem: "), "{said}");
}

#[test]
fn an_authority_between_that_ends_is_told_of_as_the_listeners_own() {
    let owner = Owner::Between(Use::Agents, PathBuf::from("server.pem"));
    assert_eq!((owner.serves(), owner.node()), ("agents", ""));
    assert_eq!(owner.file(), Some(Path::new("server.pem")));
    let (level, said) = ends(owner, -1, 3).remark(NOW).unwrap();
    assert_eq!(
        (level, said.as_str()),
        (
            Level::WARN,
            "`agents.tls`: server.pem, of an authority behind the listener's own: the certificate with serial a5 expires in 3 days, at 2027-01-18T08:00:00Z: \
             clients refuse the listener's with it: put the authority's new one behind the listener's own in the file"
        )
    );
}

#[test]
fn each_is_said_once_a_day_and_at_once_when_it_is_news() {
    let mut reminders = Reminders::default();
    let mut count = |all: &[Ends], after: i64| reminders.due(all, NOW.after(after)).len();
    let soon = ends(shown(), -1, 1);
    let late = ends(shown(), -1, 90);
    let all = [soon.clone(), late.clone()];
    assert_eq!(count(&all, 0), 1, "at load");
    assert_eq!(count(&all, HOUR), 0);
    assert_eq!(count(&all, DAY_SECONDS - 1), 0);
    assert_eq!(count(&all, DAY_SECONDS), 1, "a day later");
    assert_eq!(count(&all, DAY_SECONDS + 1), 1, "it expired");
    assert_eq!(count(&all, DAY_SECONDS + HOUR), 0);
    assert_eq!(count(&all, 2 * DAY_SECONDS + 1), 1);
    // A new certificate in the same place is another one, and one that left and came back too.
    let other = [ends(shown(), -1, 2)];
    assert_eq!(count(&other, 0), 1);
    assert_eq!(count(&[], 0), 0);
    assert_eq!(count(&other, 0), 1);
    // A clock that was set back does not silence it.
    assert_eq!(count(&other, -1), 1);
}

#[test]
fn a_fleet_that_ends_on_one_day_takes_a_few_lines_and_is_forgotten_with_its_nodes() {
    let mut reminders = Reminders::default();
    let (soon, expired) = (ends(shown(), -1, 3), ends(shown(), -9, -1));
    let nodes: Vec<Ends> = (0..100)
        .map(|number| Ends {
            owner: Owner::Node(format!("n{number}")),
            not_before: None,
            ..if number == 99 { &expired } else { &soon }.clone()
        })
        .collect();
    let lines = reminders.due(&nodes, NOW);
    assert_eq!(lines.len(), NODES_SAID_MAX + 1);
    let (level, last) = lines.last().unwrap();
    assert_eq!(*level, Level::ERROR);
    assert!(
        last.starts_with("the certificates of 84 more nodes"),
        "{last}"
    );
    assert!(reminders.due(&nodes, NOW.after(HOUR)).is_empty());
    assert_eq!(reminders.said.len(), 100);
    reminders.due(&nodes[..2], NOW.after(HOUR));
    assert_eq!(reminders.said.len(), 2);
}
