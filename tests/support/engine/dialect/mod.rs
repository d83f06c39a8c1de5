//! How a request is read and a reply is worded: one file for each endpoint, each in the words of every kind.

pub mod ask;
pub mod reply;

mod chat;
mod completions;
mod logprobs;
mod messages;
mod responses;
