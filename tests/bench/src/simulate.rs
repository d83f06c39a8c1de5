//! `llmgw-bench simulate`: a trace, or drawn requests, replayed over llmgw's own queues and over two simpler disciplines.

use std::path::PathBuf;
use std::sync::Arc;

use clap::{Args, ValueEnum};
use llmgw_core::flow::simulate::plan::ReplicaPlan;
use llmgw_core::flow::simulate::trace::Trace;
use llmgw_core::flow::simulate::{Discipline, simulate};
use llmgw_plugins::{Policies, PolicyOptions};
use serde_json::{Map, Value};

/// What is replayed, and on what.
#[derive(Args)]
pub struct Options {
    /// A trace: Azure's CSV or Mooncake's lines of JSON; drawn requests where left out
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Of a trace, the first so many; drawn, as many
    #[arg(long, default_value_t = 20_000, value_name = "N")]
    requests: usize,
    /// Tenants, times within a bucket and ties are drawn by it
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Of what the replicas can do, as a mean over the trace, which is made faster or slower to fit
    #[arg(long, default_value_t = 0.9, value_name = "SHARE")]
    load: f64,
    #[arg(long, default_value_t = 4, value_name = "N")]
    replicas: usize,
    #[arg(long, default_value_t = 32, value_name = "N")]
    slots: u32,
    #[arg(long, default_value_t = 0.1, value_name = "MS")]
    ms_per_prefill_token: f64,
    #[arg(long, default_value_t = 20.0, value_name = "MS")]
    ms_per_decode_step: f64,
    /// What each other stream of a replica adds to a step
    #[arg(long, default_value_t = 0.2, value_name = "MS")]
    ms_per_other_stream: f64,
    /// Policies; the built-in ones where left out
    #[arg(long, value_name = "DIR")]
    policies: Option<PathBuf>,
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

#[derive(Clone, Copy, Default, ValueEnum)]
enum Format {
    #[default]
    Table,
    Json,
}

pub fn run(options: &Options) -> Result<(), String> {
    if !(options.load > 0.0 && options.load.is_finite())
        || options.slots == 0
        || options.replicas == 0
    {
        return Err("load, slots and replicas are above 0".to_string());
    }
    let mut trace = match &options.trace {
        Some(path) => {
            let shown = path.display();
            let text =
                std::fs::read_to_string(path).map_err(|error| format!("{shown}: {error}"))?;
            Trace::parse(&text, options.seed).map_err(|error| format!("{shown}: {error}"))?
        }
        None => Trace::drawn(options.requests, options.seed),
    };
    trace.requests.truncate(options.requests);
    let opened = Policies::open(PolicyOptions {
        dir: options.policies.clone(),
        state: None,
    });
    let set = opened.map_err(|error| error.to_string())?.current();
    let replica = ReplicaPlan {
        slots: options.slots,
        ms_per_prefill_token: options.ms_per_prefill_token,
        ms_per_decode_step: options.ms_per_decode_step,
        ms_per_other_stream: options.ms_per_other_stream,
        ..ReplicaPlan::default()
    };
    // The first tenant asks for most: it is in the middle.
    let mut names: Vec<Arc<str>> = set
        .bands_at_load()
        .iter()
        .map(|band| band.name.clone())
        .collect();
    let middle = names.len() / 2;
    names.rotate_left(middle);
    let plan = trace.plan(
        vec![replica; options.replicas],
        options.load,
        &names,
        options.seed,
    );
    let mut all = Map::new();
    for discipline in Discipline::ALL {
        let outcome = simulate(&plan, &set, discipline).map_err(|error| error.to_string())?;
        match options.format {
            Format::Table => println!("{}", outcome.table()),
            Format::Json => {
                all.insert(discipline.name().to_string(), outcome.json());
            }
        }
    }
    if matches!(options.format, Format::Json) {
        println!("{}", Value::Object(all));
    }
    Ok(())
}
