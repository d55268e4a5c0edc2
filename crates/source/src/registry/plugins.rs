//! The process `burgeon __kubelet-login`: reads kubelet's file, and runs the plugins that match.
//!
//! The file is root's, as for kubelet, and decides what is executed; nothing else is parsed here.

use std::{
    io::Read,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Value, json};
use yaml_rust2::{Yaml, YamlLoader};

use super::{
    helper,
    providers::{Answer, Printed, configured, duration, matches},
};
use crate::opening::{Manner, opened_now};

/// The longest file, in bytes.
const FILE_MAX: u64 = 1 << 20;
/// Providers, and nested parts of the file.
const PROVIDERS_MAX: usize = 64;
const DEPTH_MAX: usize = 16;
/// The longest time of all plugins together: less than the asking process gives this one, so that
/// this one ends them.
const PLUGINS_TIME: Duration = Duration::from_secs(25);
/// Versions of the request and the response.
const VERSIONS: [&str; 3] = ["v1", "v1beta1", "v1alpha1"];

#[derive(Deserialize)]
struct File {
    kind: String,
    #[serde(default)]
    providers: Vec<Value>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Provider {
    name: String,
    match_images: Vec<String>,
    default_cache_duration: String,
    api_version: String,
    #[serde(default)]
    args: Vec<String>,
    #[serde(default)]
    env: Vec<Variable>,
    /// It wants a token of the pod's service account, which only kubelet has.
    token_attributes: Option<Value>,
}

#[derive(Deserialize)]
struct Variable {
    name: String,
    value: String,
}

/// Runs the plugins for `image`, in the order of the file. The result is for `kubelet.rs`.
pub fn ask_plugins(image: &str) -> String {
    let answer = printed(image).map_or_else(Answer::Failed, Answer::Printed);
    serde_json::to_string(&answer).unwrap_or_default()
}

fn printed(image: &str) -> Result<Vec<Printed>, String> {
    let Some(providers) = configured() else { return Ok(Vec::new()) };
    let named = |why: String| format!("{}: {why}", providers.file.display());
    let text = contents(&providers.file).map_err(named)?;
    let deadline = Instant::now() + PLUGINS_TIME;
    let mut printed = Vec::new();
    let mut failed = None;
    for provider in read(&text).map_err(named)? {
        if !provider.match_images.iter().any(|pattern| matches(pattern, image)) {
            continue;
        }
        // One that fails does not keep the others from answering.
        match provider.ask(&providers.folder, image, deadline) {
            Ok(one) => printed.push(one),
            Err(why) => failed = failed.or(Some(why)),
        }
    }
    match failed.filter(|_| printed.is_empty()) {
        Some(why) => Err(why),
        None => Ok(printed),
    }
}

fn contents(path: &Path) -> Result<String, String> {
    let file = opened_now(path, Manner::Stored).map_err(|e| format!("cannot be opened: {e}"))?;
    let mut text = String::new();
    let read = file.take(FILE_MAX + 1).read_to_string(&mut text);
    read.map_err(|e| format!("cannot be read: {e}"))?;
    match text.len() as u64 > FILE_MAX {
        true => Err(format!("has more than {FILE_MAX} bytes")),
        false => Ok(text),
    }
}

/// The usable providers of the file.
fn read(text: &str) -> Result<Vec<Provider>, String> {
    // JSON is YAML.
    let documents = YamlLoader::load_from_str(text)
        .map_err(|e| format!("is no YAML (line {})", e.marker().line()))?;
    let [document] = documents.as_slice() else {
        return Err("has not one document of YAML".to_owned());
    };
    let file: File = typed(json_of(document, 0)?, "CredentialProviderConfig")?;
    if file.kind != "CredentialProviderConfig" {
        return Err(format!("is of the kind {:?}, not CredentialProviderConfig", file.kind));
    }
    if file.providers.len() > PROVIDERS_MAX {
        return Err(format!("has more than {PROVIDERS_MAX} providers"));
    }
    let mut providers = Vec::new();
    for (at, value) in file.providers.into_iter().enumerate() {
        let provider: Provider = typed(value, &format!("providers[{at}]"))?;
        provider.check().map_err(|why| format!("providers[{at}]: {why}"))?;
        if provider.token_attributes.is_none() {
            providers.push(provider);
        }
    }
    Ok(providers)
}

fn typed<T: DeserializeOwned>(value: Value, what: &str) -> Result<T, String> {
    serde_json::from_value(value).map_err(|error| {
        // Other words of serde repeat a value, and those of `env` are secrets.
        let words = error.to_string();
        match words.starts_with("missing field") {
            true => format!("{what}: {words}"),
            false => format!("{what} has a field of another type"),
        }
    })
}

/// The part of a file as JSON has it.
fn json_of(yaml: &Yaml, depth: usize) -> Result<Value, String> {
    if depth > DEPTH_MAX {
        return Err(format!("is nested more than {DEPTH_MAX} times"));
    }
    Ok(match yaml {
        Yaml::String(text) | Yaml::Real(text) => json!(text),
        Yaml::Integer(number) => json!(number),
        Yaml::Boolean(value) => json!(value),
        Yaml::Array(all) => {
            let all = all.iter().map(|one| json_of(one, depth + 1));
            Value::Array(all.collect::<Result<_, _>>()?)
        }
        Yaml::Hash(hash) => {
            let mut map = Map::new();
            for (key, value) in hash {
                let key = key.as_str().ok_or("has a key that is not a string")?;
                map.insert(key.to_owned(), json_of(value, depth + 1)?);
            }
            Value::Object(map)
        }
        Yaml::Null | Yaml::BadValue => Value::Null,
        // As kubelet's own reader, which knows none across documents; and none can grow without
        // end.
        Yaml::Alias(_) => return Err("has an alias".to_owned()),
    })
}

impl Provider {
    fn check(&self) -> Result<(), String> {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        let name = &self.name;
        if name.is_empty() || name == "." || name == ".." || !name.chars().all(is_plain) {
            return Err(format!("{name:?} is not a name of a plugin"));
        }
        let version = self.api_version.strip_prefix("credentialprovider.kubelet.k8s.io/");
        if !version.is_some_and(|version| VERSIONS.contains(&version)) {
            return Err(format!("unknown apiVersion {:?}", self.api_version));
        }
        if duration(&self.default_cache_duration).is_none() {
            let what = &self.default_cache_duration;
            return Err(format!("defaultCacheDuration {what:?} is not a time such as \"12h\""));
        }
        match self.match_images.is_empty() {
            true => Err("matchImages is empty".to_owned()),
            false => Ok(()),
        }
    }

    fn ask(&self, folder: &Path, image: &str, deadline: Instant) -> Result<Printed, String> {
        let request = json!({
            "kind": "CredentialProviderRequest",
            "apiVersion": self.api_version,
            "image": image,
        });
        let mut command = Command::new(folder.join(&self.name));
        command.args(&self.args).env_clear().envs(helper::inherited());
        command.envs(self.env.iter().map(|variable| (&variable.name, &variable.value)));
        let name = format!("the credential provider {}", self.name);
        let left = deadline.saturating_duration_since(Instant::now());
        let response = helper::run(command, &name, &request.to_string(), left)?;
        let time = duration(&self.default_cache_duration).unwrap_or_default();
        let default_cache_ms = time.as_millis().try_into().unwrap_or(u64::MAX);
        Ok(Printed { default_cache_ms, api_version: self.api_version.clone(), response })
    }
}

#[cfg(test)]
mod tests {
    use super::read;

    const FILE: &str = "\
apiVersion: kubelet.config.k8s.io/v1
kind: CredentialProviderConfig
providers:
  - name: ecr-credential-provider
    matchImages:
      - '*.dkr.ecr.*.amazonaws.com'
    defaultCacheDuration: \"12h\"
    apiVersion: credentialprovider.kubelet.k8s.io/v1
    args: [get-credentials]
    env:
      - name: AWS_PROFILE
        value: node
  - name: with-service-account
    matchImages: [r.example]
    defaultCacheDuration: 0s
    apiVersion: credentialprovider.kubelet.k8s.io/v1
    tokenAttributes: {requireServiceAccount: true}
";

    #[test]
    fn the_file_of_a_kubelet_is_read() {
        let providers = read(FILE).unwrap();
        assert_eq!(providers.len(), 1, "one needs what only a kubelet has");
        assert_eq!(providers[0].args, ["get-credentials"]);
        assert_eq!(providers[0].env[0].value, "node");
        let json = r#"{"kind":"CredentialProviderConfig","providers":[{"name":"p","matchImages":["r"],
            "defaultCacheDuration":"1m","apiVersion":"credentialprovider.kubelet.k8s.io/v1beta1"}]}"#;
        assert_eq!(read(json).unwrap()[0].name, "p");
        assert!(read("kind: CredentialProviderConfig\nproviders: []\n").unwrap().is_empty());
    }

    #[test]
    fn a_file_that_is_none_is_refused() {
        for (from, to, said) in [
            ("name: ecr-credential-provider", "name: ../sh", "not a name"),
            ("CredentialProviderConfig", "Pod", "kind"),
            ("\"12h\"", "\"12\"", "defaultCacheDuration"),
            ("k8s.io/v1\n    args", "k8s.io/v7\n    args", "apiVersion"),
            ("    matchImages:\n      - '*.dkr.ecr.*.amazonaws.com'\n", "", "matchImages"),
            ("providers:", "providers: [", "YAML"),
            ("matchImages: [r.example]", "matchImages: []", "matchImages is empty"),
        ] {
            let text = FILE.replacen(from, to, 1);
            assert_ne!(text, FILE, "{from}");
            let why = read(&text).err().unwrap();
            assert!(why.to_lowercase().contains(&said.to_lowercase()), "{said}: {why}");
        }
        let secret = FILE.replacen("value: node", "value: 12345678", 1);
        let why = read(&secret).err().unwrap();
        assert!(why.contains("another type") && !why.contains("12345678"), "{why}");
        let deep = format!("a: {}{}", "[".repeat(40), "]".repeat(40));
        assert!(read(&deep).err().unwrap().contains("nested"));
    }
}
