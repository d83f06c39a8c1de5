//! What a node is: its GPUs, adapters, processors and memory, as it registers them and `llmgw agent inventory` prints them.
//!
//! Every number says whether it is known. Nothing that could not be read turns into a zero.

pub mod reading;

pub use reading::Reading;
