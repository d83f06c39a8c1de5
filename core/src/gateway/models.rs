//! `GET /v1/models`: the catalog as a client sees it, with each engine's own card where one is ready.

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderValue};
use http::{Method, Response};
use serde_json::{Map, Value, json};

use super::auth::Caller;
use super::body::ClientBody;
use super::respond::Failure;
use super::state::Runtime;
use crate::config::Model;
use crate::routing::replica::Readiness;

const LIST_PATH: &str = "/v1/models";

/// What a request for models asks: all of them, or one.
#[derive(Debug, PartialEq, Eq)]
pub enum Wanted {
    All,
    One(String),
}

/// Whether a request is for the list, which the gateway answers itself.
pub fn asked(method: &Method, path: &str) -> Option<Wanted> {
    if method != Method::GET && method != Method::HEAD {
        return None;
    }
    let rest = path.strip_prefix(LIST_PATH)?;
    match rest.strip_prefix('/') {
        None if rest.is_empty() => Some(Wanted::All),
        None => None,
        Some("") => Some(Wanted::All),
        Some(name) => Some(Wanted::One(percent_decode(name))),
    }
}

/// Answers from what is known already: one replica that is down delays and fails nothing.
pub fn answer(
    runtime: &Runtime,
    caller: &Caller,
    wanted: &Wanted,
) -> Result<Response<ClientBody>, Failure> {
    let body = match wanted {
        Wanted::All => {
            let cards: Vec<Value> = usable(runtime, caller)
                .flat_map(|model| {
                    let aliases = model.aliases.iter().map(|alias| &**alias);
                    std::iter::once(&*model.name)
                        .chain(aliases)
                        .map(|name| card(runtime, model, name))
                })
                .collect();
            json!({"object": "list", "data": cards})
        }
        Wanted::One(name) => match runtime.config.catalog.resolve(name) {
            Some(model) if caller.may_use(&model.name) => card(runtime, model, name),
            _ => {
                return Err(Failure::UnknownModel {
                    asked: name.clone(),
                    known: names(runtime, caller),
                });
            }
        },
    };
    let mut response = Response::new(ClientBody::full(Bytes::from(body.to_string())));
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Ok(response)
}

/// The names that this caller may use, aliases included, in the catalog's order.
pub fn names(runtime: &Runtime, caller: &Caller) -> Vec<String> {
    usable(runtime, caller)
        .flat_map(|model| std::iter::once(&model.name).chain(&model.aliases))
        .map(ToString::to_string)
        .collect()
}

fn usable<'a>(runtime: &'a Runtime, caller: &'a Caller) -> impl Iterator<Item = &'a Model> {
    let models = runtime.config.catalog.models.iter().map(AsRef::as_ref);
    models.filter(|model: &&Model| caller.may_use(&model.name))
}

/// The engine's card with every field it has, under the name that clients use. Models that are not ready are
/// listed too, and say so: they are known, only not available now.
fn card(runtime: &Runtime, model: &Model, name: &str) -> Value {
    let replicas = runtime
        .fleet
        .pool(&model.name)
        .map_or(&[][..], |pool| &pool.replicas);
    let mut own = Map::new();
    let mut ready = 0;
    for replica in replicas {
        if let Readiness::Ready { card, .. } = replica.readiness() {
            ready += 1;
            if own.is_empty()
                && let Ok(Value::Object(fields)) = serde_json::from_str(&card)
            {
                own = fields;
            }
        }
    }
    own.insert("id".to_string(), json!(name));
    own.entry("object").or_insert(json!("model"));
    own.entry("created").or_insert(json!(0));
    own.entry("owned_by").or_insert(json!("llmgw"));
    own.insert("replicas_ready".to_string(), json!(ready));
    if *name != *model.name {
        own.insert("alias_of".to_string(), json!(&*model.name));
    }
    Value::Object(own)
}

/// Model names have slashes and colons, which some clients escape. A bad escape stays as it is.
fn percent_decode(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut index = 0;
    while index < bytes.len() {
        let escaped = bytes
            .get(index + 1..index + 3)
            .filter(|_| bytes[index] == b'%')
            .and_then(|hex| std::str::from_utf8(hex).ok())
            .and_then(|hex| u8::from_str_radix(hex, 16).ok());
        match escaped {
            Some(byte) => {
                out.push(byte);
                index += 3;
            }
            None => {
                out.push(bytes[index]);
                index += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_and_one_model_are_told_apart_from_other_routes() {
        let one = |name: &str| Some(Wanted::One(name.to_string()));
        for (path, expected) in [
            ("/v1/models", Some(Wanted::All)),
            ("/v1/models/", Some(Wanted::All)),
            ("/v1/models/smol", one("smol")),
            ("/v1/models/meta-llama/Llama-3", one("meta-llama/Llama-3")),
            ("/v1/models/meta-llama%2FLlama-3", one("meta-llama/Llama-3")),
            ("/v1/models/100%", one("100%")),
            ("/v1/modelsx", None),
            ("/v1/chat/completions", None),
        ] {
            assert_eq!(asked(&Method::GET, path), expected, "{path}");
        }
        assert_eq!(asked(&Method::DELETE, "/v1/models/smol"), None);
    }
}
