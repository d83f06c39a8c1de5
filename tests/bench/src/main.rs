//! `cargo run --release -p llmgw-bench`: what llmgw costs, beside nginx and beside no proxy at all.
//!
//! One run starts everything on loopback: an engine that costs next to nothing, the proxies, and the load, each in
//! a process of its own. Proxies take turns within every round, and a figure is the median over the rounds, so
//! that a busy machine disturbs all of them alike. The table goes to stdout, progress to stderr.
//!
//! `llmgw-bench simulate` replays a trace over llmgw's queues instead, under a virtual clock.

mod children;
mod engine;
mod load;
mod plan;
mod process;
mod prompt;
mod proxies;
mod sessions;
mod simulate;
mod table;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Measures llmgw beside nginx and beside a direct connection; Markdown on stdout.
#[derive(Parser)]
#[command(name = "llmgw-bench", version)]
struct Arguments {
    #[command(flatten)]
    plan: plan::Options,
    #[command(subcommand)]
    part: Option<Part>,
}

/// What is measured instead, and the parts that run as processes of their own, started by the benchmark itself.
#[derive(Subcommand)]
enum Part {
    /// Replay a trace over llmgw's queues under a virtual clock: who waits how long, beside simpler disciplines.
    Simulate(simulate::Options),
    /// Answer like an engine, as cheaply as possible.
    #[command(hide = true)]
    Engine(engine::Options),
    /// Send load and print what came back as one line of JSON.
    #[command(hide = true)]
    Load(load::Options),
    /// Thousands of simulated agents against one server.
    Sessions(sessions::Options),
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let done = match arguments.part {
        None => plan::run(&arguments.plan),
        Some(Part::Engine(options)) => engine::run(&options).map_err(|error| error.to_string()),
        Some(Part::Simulate(options)) => simulate::run(&options),
        Some(Part::Load(options)) => load::run(&options).map_err(|error| error.to_string()),
        Some(Part::Sessions(options)) => sessions::run(&options).map_err(|error| error.to_string()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
