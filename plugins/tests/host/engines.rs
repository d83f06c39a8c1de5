//! The shipped engine plugins against what the engines really print.

use llmgw_plugins::{ErrorClass, Load, PolicySet, Samples};

/// Bodies as recorded from llama.cpp build 11434.
const IMAGE: &str = r#"{"error":{"code":500,"message":"image input is not supported - hint: if this is unexpected, you may need to provide the mmproj","type":"server_error"}}"#;
const EMBEDDINGS: &str = r#"{"error":{"code":501,"message":"This server does not support embeddings. Start it with `--embeddings`","type":"not_supported_error"}}"#;
const LOADING: &str =
    r#"{"error":{"message":"Loading model","type":"unavailable_error","code":503}}"#;

#[test]
fn each_engine_names_its_metrics_and_llama_cpps_kv_is_unknown() {
    let cases = [
        (
            "vllm",
            "vllm:num_requests_running{engine=\"0\",model_name=\"tiny\"} 2.0\nvllm:num_requests_running{engine=\"1\",model_name=\"tiny\"} 1.0\n\
             vllm:num_requests_waiting{engine=\"0\",model_name=\"tiny\"} 4.0\nvllm:num_requests_waiting_by_reason{reason=\"capacity\"} 9\n\
             vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"tiny\"} 0.25\n",
            Load {
                running: Some(3.0),
                waiting: Some(4.0),
                kv: Some(0.25),
            },
        ),
        (
            "vllm",
            "vllm:num_requests_running 2\nvllm:gpu_cache_usage_perc 0.5\n",
            Load {
                running: Some(2.0),
                waiting: None,
                kv: Some(0.5),
            },
        ),
        (
            "sglang",
            "sglang:num_running_reqs{tp_rank=\"0\"} 5\nsglang:num_queue_reqs{tp_rank=\"0\"} 1\nsglang:token_usage{tp_rank=\"0\"} 0.1\n",
            Load {
                running: Some(5.0),
                waiting: Some(1.0),
                kv: Some(0.1),
            },
        ),
        (
            "llamacpp",
            "llamacpp:requests_processing 1\nllamacpp:requests_deferred 0\n",
            Load {
                running: Some(1.0),
                waiting: Some(0.0),
                kv: None,
            },
        ),
    ];
    let set = PolicySet::built_in();
    for (engine, text, expected) in cases {
        let names = set
            .engine(engine)
            .and_then(|plugin| plugin.metrics.clone())
            .expect("it has metrics");
        assert_eq!(names.read(&Samples::parse(text)), expected, "{engine}");
    }
    assert_eq!(set.engine("openai").expect("built in").metrics, None);
}

#[test]
fn readiness_is_what_each_engine_needs() {
    let set = PolicySet::built_in();
    let health = |engine: &str| {
        set.engine(engine)
            .expect("built in")
            .readiness
            .health
            .clone()
    };
    assert_eq!(health("vllm").as_deref(), Some("/health"));
    assert_eq!(
        health("sglang").as_deref(),
        Some("/ready"),
        "its /health costs a token"
    );
    assert_eq!(health("llamacpp").as_deref(), Some("/health"));
    assert_eq!(health("openai"), None);
    assert!(
        set.engine_names().iter().all(|name| set
            .engine(name)
            .expect("listed")
            .readiness
            .models
            .is_some())
    );
}

#[test]
fn llama_cpp_is_not_blamed_for_what_its_client_did() {
    let set = PolicySet::built_in();
    let cases = [
        ("llamacpp", 500, IMAGE, ErrorClass::ClientFault),
        ("llamacpp", 501, EMBEDDINGS, ErrorClass::ClientFault),
        ("llamacpp", 503, LOADING, ErrorClass::RetryOther),
        ("llamacpp", 500, "{}", ErrorClass::RetryOther),
        ("llamacpp", 400, "{}", ErrorClass::ClientFault),
        ("vllm", 500, IMAGE, ErrorClass::RetryOther),
        ("vllm", 501, "", ErrorClass::ClientFault),
        ("vllm", 429, "", ErrorClass::Busy),
        ("unheard-of", 0, "", ErrorClass::RetryOther),
        ("unheard-of", 404, "", ErrorClass::ClientFault),
    ];
    for (engine, status, body, expected) in cases {
        assert_eq!(
            set.classify_error(engine, status, body.as_bytes()),
            expected,
            "{engine} {status} {body}"
        );
    }
    let llama = set.engine("llamacpp").expect("built in");
    assert!(llama.cancel_needs_stream && llama.drop_request_headers == ["x-conversation-id"]);
    assert_eq!(llama.commands, ["llama-server"]);
}
