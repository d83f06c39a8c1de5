//! Enums and numbers.

use super::{Result, out_of_range};
use crate::session::{RefusalCode, StopHow};
use crate::shard::{Exit, ShardState};
use crate::wire;
use crate::wire::error::{WireError, WireProblem};

pub(super) fn state_out(state: ShardState) -> wire::ShardState {
    match state {
        ShardState::Pending => wire::ShardState::Pending,
        ShardState::Starting => wire::ShardState::Starting,
        ShardState::Loading => wire::ShardState::Loading,
        ShardState::Ready => wire::ShardState::Ready,
        ShardState::Draining => wire::ShardState::Draining,
        ShardState::Stopping => wire::ShardState::Stopping,
        ShardState::Stopped => wire::ShardState::Stopped,
        ShardState::Failed => wire::ShardState::Failed,
    }
}

/// None: a state that this version has no word for.
pub(super) fn state_in(state: i32) -> Option<ShardState> {
    Some(match wire::ShardState::try_from(state) {
        Ok(wire::ShardState::Pending) => ShardState::Pending,
        Ok(wire::ShardState::Starting) => ShardState::Starting,
        Ok(wire::ShardState::Loading) => ShardState::Loading,
        Ok(wire::ShardState::Ready) => ShardState::Ready,
        Ok(wire::ShardState::Draining) => ShardState::Draining,
        Ok(wire::ShardState::Stopping) => ShardState::Stopping,
        Ok(wire::ShardState::Stopped) => ShardState::Stopped,
        Ok(wire::ShardState::Failed) => ShardState::Failed,
        Ok(wire::ShardState::Unspecified) | Err(_) => return None,
    })
}

pub(super) fn exit_out(exit: Exit) -> wire::Exit {
    use wire::exit::How;
    wire::Exit {
        how: match exit {
            Exit::Status(status) => Some(How::Status(status)),
            Exit::Signal(signal) => Some(How::Signal(signal)),
            Exit::Unknown => None,
        },
    }
}

pub(super) fn exit_in(exit: &wire::Exit) -> Exit {
    use wire::exit::How;
    match exit.how {
        Some(How::Status(status)) => Exit::Status(status),
        Some(How::Signal(signal)) => Exit::Signal(signal),
        None => Exit::Unknown,
    }
}

pub(super) fn stop_out(how: StopHow) -> wire::StopHow {
    match how {
        StopHow::Drain => wire::StopHow::Drain,
        StopHow::Stop => wire::StopHow::Stop,
        StopHow::Kill => wire::StopHow::Kill,
    }
}

/// There is no cautious guess at how something is to be stopped.
pub(super) fn stop_in(how: i32) -> Result<StopHow> {
    match wire::StopHow::try_from(how) {
        Ok(wire::StopHow::Drain) => Ok(StopHow::Drain),
        Ok(wire::StopHow::Stop) => Ok(StopHow::Stop),
        Ok(wire::StopHow::Kill) => Ok(StopHow::Kill),
        Ok(wire::StopHow::Unspecified) | Err(_) => {
            Err(WireError::at("how", WireProblem::UnknownWord(how)))
        }
    }
}

pub(super) fn refusal_out(code: RefusalCode) -> wire::RefusalCode {
    match code {
        RefusalCode::Identity => wire::RefusalCode::Identity,
        RefusalCode::NodeTaken => wire::RefusalCode::NodeTaken,
        RefusalCode::Superseded => wire::RefusalCode::Superseded,
        RefusalCode::Malformed => wire::RefusalCode::Malformed,
        RefusalCode::TooSlow => wire::RefusalCode::TooSlow,
        RefusalCode::Full => wire::RefusalCode::Full,
        RefusalCode::Other => wire::RefusalCode::Unspecified,
    }
}

/// A refusal is one, whatever its reason is called.
pub(super) fn refusal_in(code: i32) -> RefusalCode {
    match wire::RefusalCode::try_from(code) {
        Ok(wire::RefusalCode::Identity) => RefusalCode::Identity,
        Ok(wire::RefusalCode::NodeTaken) => RefusalCode::NodeTaken,
        Ok(wire::RefusalCode::Superseded) => RefusalCode::Superseded,
        Ok(wire::RefusalCode::Malformed) => RefusalCode::Malformed,
        Ok(wire::RefusalCode::TooSlow) => RefusalCode::TooSlow,
        Ok(wire::RefusalCode::Full) => RefusalCode::Full,
        Ok(wire::RefusalCode::Unspecified) | Err(_) => RefusalCode::Other,
    }
}

/// Nothing that is waited for takes longer; much longer ones overflow what clocks can add.
pub(super) const TIME_MAX_MS: u64 = 30 * 24 * 60 * 60 * 1_000;

/// How long something may take.
pub(super) fn time(time_ms: u64, field: &str) -> Result<u64> {
    match time_ms <= TIME_MAX_MS {
        true => Ok(time_ms),
        false => Err(out_of_range(field, time_ms)),
    }
}

/// A port that something can listen on.
pub(super) fn port(number: u32) -> Result<u16> {
    match u16::try_from(number) {
        Ok(port) if port != 0 => Ok(port),
        _ => Err(out_of_range("", number.into())),
    }
}
