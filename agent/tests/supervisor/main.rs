//! The supervisor over real processes: fake engines and shell scripts, started, stopped, killed and adopted.

mod adopt;
mod harness;
mod kill;
mod life;
mod real;
mod stop;
