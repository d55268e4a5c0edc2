//! kubelet's credential provider plugins: programs that return logins for images.
//!
//! ```text
//!   login: REGISTRY/REPOSITORY ──► burgeon __kubelet-login      reads kubelet's file, runs the plugins
//!                                    │ stdin:  CredentialProviderRequest  {image}
//!                                    ▼ stdout: CredentialProviderResponse {auth, cacheKeyType, …}
//!          logins by pattern   ◄── what they printed, unread
//! ```
//!
//! The file is that of kubelet's `--image-credential-provider-config`, and the folder that of
//! `--image-credential-provider-bin-dir`. A process of its own reads the file, and runs in a
//! process group with the plugins, like a credential helper (`helper.rs`). Only the process that
//! asks reads what plugins print; in a daemon that is the server, in its sandbox.
//!
//! Invariants: plugins run only from the configured folder; they inherit `PATH`, `HOME` and their
//! configured variables; the output, the time and the number of kept answers have bounds; an answer
//! that a registry has refused is not used again; nothing that a plugin prints is shown.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use docker_credential::DockerCredential;
use serde::Deserialize;

use super::{
    Name, helper,
    providers::{Answer, PLUGINS, Printed, configured, duration, matches},
};

/// Answers that are kept.
const KEPT_MAX: usize = 64;
/// The longest time that an answer is kept.
const KEPT_FOR_MAX: Duration = Duration::from_secs(24 * 3600);

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Response {
    kind: String,
    api_version: String,
    cache_key_type: String,
    cache_duration: Option<String>,
    /// Logins by patterns of images.
    auth: Option<HashMap<String, Login>>,
}

#[derive(Deserialize)]
struct Login {
    username: String,
    password: String,
}

/// Logins that may be used until a moment.
#[derive(Debug)]
struct Kept {
    /// The image, its registry, or nothing: the answer is good for all.
    key: String,
    until: Instant,
    /// By pattern of images, the longest first.
    logins: Vec<(String, String, String)>,
}

static KEPT: Mutex<Vec<Kept>> = Mutex::new(Vec::new());

/// Asks the plugins for a login for the image `name`; `None` if there is none, or no plugins are
/// configured. After a refusal nothing that was kept is used.
pub(super) fn credentials(
    name: &Name,
    is_refused: bool,
) -> Result<Option<DockerCredential>, String> {
    if configured().is_none() {
        return Ok(None);
    }
    let image = format!("{}/{}", name.registry(), name.repository());
    {
        let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        kept.retain(|one| one.until > now && !(is_refused && one.serves(&image, name.registry())));
        let found = kept.iter().filter(|one| one.serves(&image, name.registry()));
        if let Some(login) = found.into_iter().find_map(|one| one.login(&image)) {
            return Ok(Some(login));
        }
    }
    let said = helper::said(PLUGINS, &image)?;
    if said.contains(helper::NOT_FOUND) {
        return Ok(None);
    }
    let answer = serde_json::from_str(&said);
    let printed = match answer.map_err(|_| "kubelet's credential providers were not run")? {
        Answer::Printed(printed) => printed,
        Answer::Failed(why) => return Err(why),
    };
    let (mut login, mut wrong) = (None, None);
    for one in printed {
        let (answer, keep) = match understand(&one, &image, name.registry()) {
            Ok(understood) => understood,
            Err(why) => {
                wrong = wrong.or(Some(why));
                continue;
            }
        };
        login = login.or_else(|| answer.login(&image));
        if keep {
            let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
            if kept.len() == KEPT_MAX {
                kept.remove(0);
            }
            kept.push(answer);
        }
    }
    match wrong.filter(|_| login.is_none()) {
        Some(why) => Err(why),
        None => Ok(login),
    }
}

/// A response as logins, and whether they are kept.
fn understand(printed: &Printed, image: &str, registry: &str) -> Result<(Kept, bool), String> {
    let wrong = |why: &str| format!("a credential provider of kubelet {why}");
    let response: Response = serde_json::from_str(&printed.response)
        .map_err(|_| wrong("prints no CredentialProviderResponse"))?;
    if response.kind != "CredentialProviderResponse" || response.api_version != printed.api_version
    {
        return Err(wrong("answers in another version than the one of its request"));
    }
    let key = match response.cache_key_type.as_str() {
        "Image" => image,
        "Registry" => registry,
        "Global" => "",
        _ => return Err(wrong("answers with an unknown cacheKeyType")),
    };
    let time = match response.cache_duration.as_deref() {
        Some(text) => duration(text).ok_or_else(|| wrong("answers with no valid cacheDuration"))?,
        None => Duration::from_millis(printed.default_cache_ms),
    };
    let mut logins: Vec<_> = response.auth.unwrap_or_default().into_iter().collect();
    logins.sort_by(|(one, _), (other, _)| other.cmp(one));
    let logins = logins.into_iter().map(|(pattern, it)| (pattern, it.username, it.password));
    let until = Instant::now() + time.min(KEPT_FOR_MAX);
    let kept = Kept { key: key.to_owned(), until, logins: logins.collect() };
    Ok((kept, !time.is_zero()))
}

impl Kept {
    fn serves(&self, image: &str, registry: &str) -> bool {
        [image, registry, ""].contains(&self.key.as_str())
    }

    fn login(&self, image: &str) -> Option<DockerCredential> {
        let mut logins = self.logins.iter();
        let (_, user, password) = logins.find(|(pattern, ..)| matches(pattern, image))?;
        Some(DockerCredential::UsernamePassword(user.clone(), password.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::{DockerCredential, Printed, understand};

    #[test]
    fn a_response_is_read_with_its_bounds_and_shown_to_nobody() {
        let version = "credentialprovider.kubelet.k8s.io/v1";
        let read = |text: &str| {
            let printed = Printed {
                default_cache_ms: 60_000,
                api_version: version.to_owned(),
                response: text.replace("VERSION", version),
            };
            understand(&printed, "r.example/team/app", "r.example")
        };
        let auth = r#""auth":{"r.example":{"username":"u","password":"general"},
            "r.example/team":{"username":"u","password":"team"}}"#;
        let response = |more: &str| {
            let kind = r#""kind":"CredentialProviderResponse","apiVersion":"VERSION""#;
            format!("{{{kind},{more},{auth}}}")
        };
        let (kept, keeps) = read(&response(r#""cacheKeyType":"Registry""#)).unwrap();
        assert!(keeps && kept.key == "r.example");
        let team = DockerCredential::UsernamePassword("u".into(), "team".into());
        assert_eq!(kept.login("r.example/team/app"), Some(team));
        assert_eq!(kept.login("other.example/x"), None);
        let none = response(r#""cacheKeyType":"Global","cacheDuration":"0s""#);
        assert!(!read(&none).unwrap().1, "it is not kept");
        for wrong in [
            response(r#""cacheKeyType":"Secret""#),
            response(r#""cacheKeyType":"Image","cacheDuration":"soon""#),
            response(r#""cacheKeyType":"Image""#).replace("VERSION", "other/v1"),
            "hunter2".to_owned(),
        ] {
            let why = read(&wrong).unwrap_err();
            assert!(!why.contains("hunter2") && !why.contains("team"), "{why}");
        }
    }
}
