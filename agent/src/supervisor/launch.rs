//! From a spec's command to what is executed: file, arguments, and the whole environment.

use std::collections::BTreeMap;
use std::path::PathBuf;

use llmgw_proto::shard::{
    API_KEY_FILE_PLACE, API_KEY_PLACE, SHARD_VARIABLE, ShardCommand, ShardSpec,
};

use super::tree::STATE_VARIABLE;

/// What an engine gets of the agent's own environment. The operator adds what else it needs in `agent.yaml`.
pub const KEPT_VARIABLES: [&str; 9] = [
    "HOME", "LANG", "LC_ALL", "LC_CTYPE", "LOGNAME", "PATH", "TMPDIR", "TZ", "USER",
];

/// Which GPUs CUDA shows: those of the shard by uuid, and none to a shard without.
const VISIBLE_GPUS: &str = "CUDA_VISIBLE_DEVICES";

/// What the node's operator lets an engine have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineAllowance {
    /// The files that it may execute, by the name that a spec gives them.
    pub executables: BTreeMap<String, PathBuf>,
    pub env: BTreeMap<String, String>,
}

/// Whether a command wants the key as a file.
pub fn wants_key_file(command: &ShardCommand) -> bool {
    places(command).any(|text| text.contains(API_KEY_FILE_PLACE))
}

/// Whether a command wants the key in any way.
pub fn wants_key(command: &ShardCommand) -> bool {
    places(command).any(|text| text.contains(API_KEY_PLACE) || text.contains(API_KEY_FILE_PLACE))
}

fn places(command: &ShardCommand) -> impl Iterator<Item = &String> {
    command.args.iter().chain(command.env.values())
}

/// The arguments, the key in its place.
pub fn arguments(spec: &ShardSpec, command: &ShardCommand, key_file: &str) -> Vec<String> {
    let put = |text: &String| put_key(text, spec, key_file);
    command.args.iter().map(put).collect()
}

/// The whole environment: some of the agent's, the operator's for this engine, the spec's, and last what tells whose it is.
pub fn environment(
    spec: &ShardSpec,
    command: &ShardCommand,
    allowance: &EngineAllowance,
    state_dir: &str,
    key_file: &str,
    agents: &dyn Fn(&str) -> Option<String>,
) -> BTreeMap<String, String> {
    let mut env: BTreeMap<String, String> = KEPT_VARIABLES
        .iter()
        .filter_map(|name| Some(((*name).to_owned(), agents(name)?)))
        .collect();
    env.extend(allowance.env.clone());
    for (name, value) in &command.env {
        env.insert(name.clone(), put_key(value, spec, key_file));
    }
    env.insert(VISIBLE_GPUS.to_owned(), spec.gpus.join(","));
    env.insert(SHARD_VARIABLE.to_owned(), spec.shard.clone());
    env.insert(STATE_VARIABLE.to_owned(), state_dir.to_owned());
    env
}

fn put_key(text: &str, spec: &ShardSpec, key_file: &str) -> String {
    let key = spec.api_key.as_ref().map_or("", |key| key.expose());
    text.replace(API_KEY_FILE_PLACE, key_file)
        .replace(API_KEY_PLACE, key)
}

#[cfg(test)]
mod tests {
    use llmgw_proto::shard::ApiKey;

    use super::*;
    use crate::supervisor::testing;

    #[test]
    fn the_environment_is_cleaned_and_the_later_source_wins() {
        let mut spec = testing::spec("m/0/0");
        spec.gpus = vec!["GPU-a".to_owned(), "GPU-b".to_owned()];
        spec.api_key = Some(ApiKey::new("sk-1".to_owned()));
        let command = &mut spec.commands[0];
        for (name, value) in [
            ("A", "spec"),
            ("KEY", "${LLMGW_API_KEY}"),
            ("KEY_FILE", "${LLMGW_API_KEY_FILE}"),
            ("LLMGW_SHARD", "another/0/0"),
        ] {
            command.env.insert(name.to_owned(), value.to_owned());
        }
        let allowance = EngineAllowance {
            env: [
                ("A".to_owned(), "operator".to_owned()),
                ("B".to_owned(), "b".to_owned()),
            ]
            .into(),
            ..EngineAllowance::default()
        };
        let agents = |name: &str| match name {
            "PATH" => Some("/bin".to_owned()),
            "LD_PRELOAD" | "AWS_SECRET" => Some("leaks".to_owned()),
            _ => None,
        };
        let env = environment(
            &spec,
            &spec.commands[0],
            &allowance,
            "/state",
            "/k",
            &agents,
        );
        let expected = [
            ("A", "spec"),
            ("B", "b"),
            ("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b"),
            ("KEY", "sk-1"),
            ("KEY_FILE", "/k"),
            ("LLMGW_SHARD", "m/0/0"),
            ("LLMGW_STATE", "/state"),
            ("PATH", "/bin"),
        ];
        let expected = expected.map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(env, BTreeMap::from(expected));
    }

    #[test]
    fn a_shard_without_gpus_sees_none() {
        let spec = testing::spec("m/0/0");
        let allowance = EngineAllowance::default();
        let env = environment(&spec, &spec.commands[0], &allowance, "/s", "", &|_| None);
        assert_eq!(env["CUDA_VISIBLE_DEVICES"], "");
    }
}
