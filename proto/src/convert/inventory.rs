//! The inventory travels as its JSON text in one field, not as messages of its own.
//!
//! It has far more than a hundred values, each of them known, stale or unknown with a cause, and gains new ones with every driver. Its JSON
//! is a format of its own already (`llmgw agent inventory --format json`, recorded in support cases), whose readers skip keys and words that
//! they don't know. Twice the same vocabulary would be twice the places where a newer agent and an older server can disagree. And where they do, the damage
//! is contained: an inventory that can't be read makes a node that gets nothing new and says why, while what it runs is still heard.

use crate::inventory::Inventory;
use crate::inventory::gpu::{HealthCode, HealthFlag};
use crate::session::Told;
use crate::wire;
use crate::wire::shape::{GPUS_MAX, INVENTORY_MAX_BYTES};

use super::{name, sentence};

/// The format that this version writes and reads. Another number: what is in it must not be guessed at.
const SCHEMA: &str = "llmgw.inventory/1";

/// None: there is nothing to tell.
pub(super) fn out(told: &Told) -> Option<wire::Inventory> {
    let Told::Inventory(inventory) = told else {
        return None;
    };
    // An inventory has no maps with keys that are not texts, which is all that could fail.
    let json = serde_json::to_vec(&**inventory).unwrap_or_default();
    (json.len() <= INVENTORY_MAX_BYTES).then(|| wire::Inventory {
        schema: SCHEMA.to_owned(),
        json,
    })
}

pub(super) fn taken(inventory: Option<wire::Inventory>) -> Told {
    let Some(inventory) = inventory else {
        return Told::Unreadable("the agent sent no inventory".to_owned());
    };
    if inventory.schema != SCHEMA {
        return Told::Unreadable(format!(
            "the agent's inventory has the format `{}`, this version reads `{SCHEMA}`",
            inventory.schema
        ));
    }
    match serde_json::from_slice::<Inventory>(&inventory.json) {
        Ok(inventory) if inventory.gpus.devices.len() <= GPUS_MAX => {
            Told::Inventory(inventory.into())
        }
        Ok(inventory) => Told::Unreadable(format!(
            "the agent's inventory has {} GPUs, more than {GPUS_MAX}",
            inventory.gpus.devices.len()
        )),
        Err(error) => Told::Unreadable(sentence(&format!(
            "the agent's inventory can't be read: {error}"
        ))),
    }
}

pub(super) fn flag_out(flag: &HealthFlag) -> wire::HealthFlag {
    let code = serde_json::to_value(flag.code);
    let code = code.ok().and_then(|code| code.as_str().map(str::to_owned));
    wire::HealthFlag {
        code: name(&code.unwrap_or_default()),
        reason: sentence(&flag.reason),
    }
}

pub(super) fn flag_in(flag: wire::HealthFlag) -> HealthFlag {
    let code = serde_json::from_value(serde_json::Value::String(flag.code));
    HealthFlag {
        code: code.unwrap_or(HealthCode::Other),
        reason: flag.reason,
    }
}
