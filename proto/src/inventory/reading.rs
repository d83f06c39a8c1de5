//! A value as far as it could be read: known, stale, or unknown with the cause. Never 0 for unknown.

use serde::{Deserialize, Serialize};

/// One value of the inventory.
///
/// In JSON a known value stands bare, a stale one is `{"stale": VALUE, "age_ms": N}`, an unknown one `{"unknown": "why"}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Written<T>", into = "Written<T>")]
#[serde(bound(
    serialize = "T: Serialize + Clone",
    deserialize = "T: Deserialize<'de>"
))]
pub enum Reading<T> {
    Known(T),
    /// Read before; the source has not answered since.
    Stale {
        value: T,
        age_ms: u64,
    },
    /// Why, as a person reads it: `not supported by this GPU`.
    Unknown(String),
}

/// How a reading is written. An object with one of these two keys is never a known value: known ones are numbers,
/// strings, booleans and lists.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Written<T> {
    Stale { stale: T, age_ms: u64 },
    Unknown { unknown: String },
    Known(T),
}

impl<T> Reading<T> {
    pub fn unknown(why: impl Into<String>) -> Reading<T> {
        Reading::Unknown(why.into())
    }

    /// The value, fresh or stale.
    pub fn value(&self) -> Option<&T> {
        match self {
            Reading::Known(value) | Reading::Stale { value, .. } => Some(value),
            Reading::Unknown(_) => None,
        }
    }

    /// The value if it was read just now.
    pub fn known(&self) -> Option<&T> {
        match self {
            Reading::Known(value) => Some(value),
            Reading::Stale { .. } | Reading::Unknown(_) => None,
        }
    }

    pub fn map<U>(self, change: impl FnOnce(T) -> U) -> Reading<U> {
        match self {
            Reading::Known(value) => Reading::Known(change(value)),
            Reading::Stale { value, age_ms } => Reading::Stale {
                value: change(value),
                age_ms,
            },
            Reading::Unknown(why) => Reading::Unknown(why),
        }
    }

    /// The same, now that its source has been silent for `age_ms`.
    pub fn aged(self, age_ms: u64) -> Reading<T> {
        match self {
            Reading::Known(value) | Reading::Stale { value, .. } => {
                Reading::Stale { value, age_ms }
            }
            Reading::Unknown(why) => Reading::Unknown(why),
        }
    }
}

impl<T> From<Written<T>> for Reading<T> {
    fn from(written: Written<T>) -> Reading<T> {
        match written {
            Written::Known(value) => Reading::Known(value),
            Written::Stale { stale, age_ms } => Reading::Stale {
                value: stale,
                age_ms,
            },
            Written::Unknown { unknown } => Reading::Unknown(unknown),
        }
    }
}

impl<T> From<Reading<T>> for Written<T> {
    fn from(reading: Reading<T>) -> Written<T> {
        match reading {
            Reading::Known(value) => Written::Known(value),
            Reading::Stale { value, age_ms } => Written::Stale {
                stale: value,
                age_ms,
            },
            Reading::Unknown(unknown) => Written::Unknown { unknown },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reading_is_written_and_read_back_without_loss() {
        for (reading, json) in [
            (Reading::Known(81_559_u64), "81559"),
            (
                Reading::Stale {
                    value: 7,
                    age_ms: 1_500,
                },
                r#"{"stale":7,"age_ms":1500}"#,
            ),
            (
                Reading::unknown("not supported"),
                r#"{"unknown":"not supported"}"#,
            ),
        ] {
            assert_eq!(serde_json::to_string(&reading).unwrap(), json);
            assert_eq!(
                serde_json::from_str::<Reading<u64>>(json).unwrap(),
                reading,
                "{json}"
            );
        }
    }

    #[test]
    fn an_unknown_value_stays_unknown_and_an_old_one_keeps_its_value() {
        let unknown: Reading<u64> = Reading::unknown("no driver");
        assert_eq!(unknown.value(), None);
        assert_eq!(unknown.clone().aged(5), unknown);
        let old = Reading::Known(3).aged(10).aged(20);
        assert_eq!((old.value(), old.known()), (Some(&3), None));
        assert_eq!(
            old.map(|value| value + 1),
            Reading::Stale {
                value: 4,
                age_ms: 20
            }
        );
    }
}
