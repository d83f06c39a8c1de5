//! `POST /v1/policies/…`: a person chooses the generation in force, or gives tripped hooks another chance.

use llmgw_plugins::Policies;

/// What can be done with the policies of a running server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyAction {
    /// Back to the generation before this one; the directory is ignored until [`PolicyAction::Unpin`].
    Rollback,
    /// The same for the generation that `?generation=N` names.
    Pin,
    /// Follow the directory again.
    Unpin,
    /// Switch on again the hooks that failed too often.
    Untrip,
}

/// Why nothing, or not everything, was done.
#[derive(Debug, PartialEq, Eq)]
pub enum ActionError {
    /// `pin` names no generation, or not with a number.
    Generation(String),
    /// It isn't kept; the reason lists those that are.
    UnknownGeneration(String),
    /// The directory is followed again, but what is in it doesn't load.
    DirectoryBroken(String),
}

impl ActionError {
    /// For programs.
    pub fn code(&self) -> &'static str {
        match self {
            ActionError::Generation(_) => "invalid_generation",
            ActionError::UnknownGeneration(_) => "unknown_generation",
            ActionError::DirectoryBroken(_) => "reload_failed",
        }
    }

    /// For people.
    pub fn message(&self) -> &str {
        match self {
            ActionError::Generation(message)
            | ActionError::UnknownGeneration(message)
            | ActionError::DirectoryBroken(message) => message,
        }
    }
}

/// Does it, and says what is in force now. Blocks while a set is loaded: not for a serving thread.
pub fn act(
    policies: &Policies,
    action: PolicyAction,
    query: Option<&str>,
) -> Result<String, ActionError> {
    match action {
        PolicyAction::Rollback => pin(policies, None),
        PolicyAction::Pin => pin(policies, Some(generation(query)?)),
        PolicyAction::Unpin => {
            let set = policies.unpin().map_err(|error| {
                ActionError::DirectoryBroken(format!(
                    "the directory is followed again, but generation {} stays until it loads: {error}",
                    policies.current().generation()
                ))
            })?;
            Ok(format!(
                "generation {} is in force, the directory is followed again",
                set.generation()
            ))
        }
        PolicyAction::Untrip => Ok(untrip(policies)),
    }
}

fn pin(policies: &Policies, generation: Option<u64>) -> Result<String, ActionError> {
    let set = policies
        .pin(generation)
        .map_err(|error| ActionError::UnknownGeneration(error.reason))?;
    Ok(format!(
        "generation {} is in force, the directory is ignored until `llmgw ctl policies unpin`",
        set.generation()
    ))
}

fn untrip(policies: &Policies) -> String {
    let set = policies.current();
    let tripped = set.tripped();
    set.untrip();
    if tripped.is_empty() {
        return "no hook was switched off".to_owned();
    }
    let names: Vec<&str> = tripped.iter().map(|hook| hook.name()).collect();
    format!("switched on again: {}", names.join(", "))
}

fn generation(query: Option<&str>) -> Result<u64, ActionError> {
    let given = query
        .unwrap_or_default()
        .split('&')
        .find_map(|pair| pair.strip_prefix("generation="));
    let Some(given) = given else {
        let message = "say which one: `/v1/policies/pin?generation=N`".to_owned();
        return Err(ActionError::Generation(message));
    };
    given.parse().map_err(|_| {
        // It is echoed into an answer: not more of it than a number could be.
        let given: String = given.chars().take(20).collect();
        ActionError::Generation(format!("`{given}` is not the number of a generation"))
    })
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};
    use std::sync::Arc;

    use llmgw_plugins::PolicyOptions;

    use super::*;

    /// A directory that goes with the test.
    struct Directory(PathBuf);

    impl Directory {
        fn new(name: &str) -> Directory {
            let path =
                std::env::temp_dir().join(format!("llmgw-admin-{}-{name}", std::process::id()));
            std::fs::create_dir_all(&path).unwrap();
            Directory(path)
        }
    }

    impl Drop for Directory {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn knob(dir: &Path, value: &str) {
        let text =
            format!("return {{ api = 1, weights = function() return {{ kv = {value} }} end }}");
        std::fs::write(dir.join("routing.lua"), text).unwrap();
    }

    fn three_generations(dir: &Path) -> Arc<Policies> {
        knob(dir, "1");
        let options = PolicyOptions {
            dir: Some(dir.to_path_buf()),
            state: None,
        };
        let policies = Policies::open(options).unwrap();
        for value in ["2", "3"] {
            knob(dir, value);
            policies.reload().unwrap();
        }
        policies
    }

    #[test]
    fn a_rollback_holds_until_the_directory_is_followed_again() {
        let dir = Directory::new("rollback");
        let policies = three_generations(&dir.0);
        let said = act(&policies, PolicyAction::Rollback, None).unwrap();
        assert!(said.starts_with("generation 2 is in force"), "{said}");
        knob(&dir.0, "4");
        policies.reload().unwrap();
        assert_eq!(policies.current().generation(), 2);
        let said = act(&policies, PolicyAction::Rollback, None).unwrap();
        assert!(said.starts_with("generation 1 is in force"), "{said}");
        let error = act(&policies, PolicyAction::Rollback, None).unwrap_err();
        assert_eq!(error.code(), "unknown_generation");
        assert!(
            error.message().ends_with("there are 1, 2, 3"),
            "{}",
            error.message()
        );
        let said = act(&policies, PolicyAction::Unpin, None).unwrap();
        assert_eq!(
            said,
            "generation 4 is in force, the directory is followed again"
        );
    }

    #[test]
    fn a_generation_is_pinned_by_its_number_and_by_nothing_else() {
        let dir = Directory::new("pin");
        let policies = three_generations(&dir.0);
        let said = act(&policies, PolicyAction::Pin, Some("generation=1")).unwrap();
        assert!(said.starts_with("generation 1 is in force"), "{said}");
        let cases = [
            (Some("generation=9"), "unknown_generation"),
            (Some("generation=x"), "invalid_generation"),
            (Some("generation=-1"), "invalid_generation"),
            (Some("other=1"), "invalid_generation"),
            (None, "invalid_generation"),
        ];
        for (query, code) in cases {
            let error = act(&policies, PolicyAction::Pin, query).unwrap_err();
            assert_eq!(error.code(), code, "{query:?}");
        }
        assert_eq!(policies.current().generation(), 1);
    }

    #[test]
    fn to_follow_a_broken_directory_is_refused_with_its_mistake() {
        let dir = Directory::new("broken");
        let policies = three_generations(&dir.0);
        act(&policies, PolicyAction::Rollback, None).unwrap();
        knob(&dir.0, "nonsense +");
        let error = act(&policies, PolicyAction::Unpin, None).unwrap_err();
        assert_eq!(error.code(), "reload_failed");
        assert!(
            error.message().contains("routing.lua:1"),
            "{}",
            error.message()
        );
        assert!(!policies.status().pinned);
        assert_eq!(policies.current().generation(), 2);
    }

    #[test]
    fn untrip_names_what_it_switched_on() {
        let dir = Directory::new("untrip");
        std::fs::write(
            dir.0.join("fairness.lua"),
            "return { api = 1, key = function(request) if request.age_ms > 1 then error('no') end end }",
        )
        .unwrap();
        let options = PolicyOptions {
            dir: Some(dir.0.clone()),
            state: None,
        };
        let policies = Policies::open(options).unwrap();
        assert_eq!(
            act(&policies, PolicyAction::Untrip, None).unwrap(),
            "no hook was switched off"
        );
        let request = llmgw_plugins::RequestView {
            age_ms: 2.0,
            ..Default::default()
        };
        for _ in 0..llmgw_plugins::TRIP_ERRORS {
            policies
                .current()
                .key(&request, &llmgw_plugins::TenantView::default());
        }
        assert_eq!(
            act(&policies, PolicyAction::Untrip, None).unwrap(),
            "switched on again: fairness.key"
        );
        assert!(policies.status().trips.is_empty());
    }
}
