//! What an agent finds out before it starts.

use super::*;

#[test]
fn a_state_directory_has_one_name_however_it_is_written() {
    let place = std::env::temp_dir().join(format!("llmgw-daemon-{}", std::process::id()));
    let state = place.join("state");
    let name = state_dir(&state).expect("it can be made");
    let link = place.join("link");
    std::os::unix::fs::symlink(&state, &link).expect("it can be made");
    for written in [&state, &link, &place.join("state/../state/.")] {
        assert_eq!(state_dir(written).expect("it is there"), name);
    }
    let other = state_dir(&place.join("other")).expect("it can be made");
    assert_ne!(other, name);
    std::fs::remove_dir_all(&place).expect("it is there");
}
