use std::{collections::BTreeMap, fmt, path::Path};

use object_store::{aws::AmazonS3ConfigKey, azure::AzureConfigKey, gcp::GoogleConfigKey};
use serde::{Deserialize, Serialize};

use crate::{Location, location::Scheme, remote::key_file};

/// The variable that holds Docker's `config.json` if there is no file.
const REGISTRIES: &str = "DOCKER_AUTH_CONFIG";

/// The hosts that serve registries: [`crate::registry::Hosts`] as JSON. Never taken from the
/// environment.
const HOSTS: &str = "BURGEON_REGISTRY_HOSTS";

/// The settings to use a store, besides its location: endpoint, region, credentials, taken from
/// the environment under their usual names (`AWS_…`, `GOOGLE_…`, `AZURE_…`, `DOCKER_AUTH_CONFIG`).
///
/// The values are secrets. They leave this type only for the library that signs requests, for a
/// file that only its owner can read, and for a child's environment; `Debug` shows names alone.
#[derive(Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Access(BTreeMap<String, String>);

impl Access {
    /// The settings in this process's environment, for stores of any kind.
    pub fn from_env() -> Self {
        // No store has a setting that is not UTF-8.
        let variables = std::env::vars_os().filter_map(|(name, value)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        });
        Self::from_variables(variables)
    }

    /// The settings that the parent process has passed on by [`Self::variables`].
    pub fn from_parent() -> Self {
        let own = Self::from_env();
        match std::env::var(HOSTS) {
            Ok(hosts) => own.with_hosts(hosts),
            Err(_) => own,
        }
    }

    fn from_variables(variables: impl IntoIterator<Item = (String, String)>) -> Self {
        let known = variables
            .into_iter()
            .filter(|(name, _)| name == REGISTRIES || scheme_of(name).is_some());
        Self(known.collect())
    }

    /// The settings for stores like `location`; for a folder those for registries, which may have
    /// the layers of its images.
    pub fn for_location(&self, location: &Location) -> Self {
        let concerns = |name: &String| match location {
            Location::Remote(url) => scheme_of(name) == Some(url.scheme),
            Location::Folder(_) | Location::Registry(_) => name == REGISTRIES || name == HOSTS,
        };
        let variables = self.0.iter().filter(|(name, _)| concerns(name));
        Self(variables.map(|(name, value)| (name.clone(), value.clone())).collect())
    }

    /// Only settings for registries: `config` is a Docker `config.json`.
    pub(crate) fn of_registries(config: String) -> Self {
        Self([(REGISTRIES.to_owned(), config)].into())
    }

    /// The settings for registries: Docker's `config.json`.
    pub(crate) fn registries(&self) -> Option<&str> {
        self.0.get(REGISTRIES).map(String::as_str)
    }

    /// All settings but the hosts that serve registries, which give nobody a right.
    pub fn without_hosts(mut self) -> Self {
        self.0.remove(HOSTS);
        self
    }

    /// Adds the hosts that serve a registry.
    pub(crate) fn with_hosts(mut self, hosts: String) -> Self {
        self.0.insert(HOSTS.to_owned(), hosts);
        self
    }

    /// The hosts that [`Self::with_hosts`] has added.
    pub(crate) fn hosts(&self) -> Option<&str> {
        self.0.get(HOSTS).map(String::as_str)
    }

    /// The union of both; `other` wins where they differ.
    pub fn and(mut self, other: Self) -> Self {
        self.0.extend(other.0);
        self
    }

    /// The names of settings that only one has, or that differ.
    pub fn differing<'a>(&'a self, other: &'a Self) -> Vec<&'a str> {
        let names: std::collections::BTreeSet<_> = self.0.keys().chain(other.0.keys()).collect();
        let differing = names.into_iter().filter(|name| self.0.get(*name) != other.0.get(*name));
        differing.map(String::as_str).collect()
    }

    /// True if there are no settings: those of the machine itself may be enough.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The files that settings name: keys and tokens.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        let named = |(name, value)| key_file(&str::to_ascii_lowercase(name), value);
        self.variables().filter_map(named)
    }

    /// Names and values, for a child's environment.
    pub fn variables(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (&**name, &**value))
    }
}

/// The stores that an environment variable applies to, if any.
fn scheme_of(name: &str) -> Option<Scheme> {
    let (vendor, _) = name.split_once('_')?;
    let key = name.to_ascii_lowercase();
    let (scheme, known) = match vendor {
        "AWS" => (Scheme::S3, key.parse::<AmazonS3ConfigKey>().is_ok()),
        "GOOGLE" => (Scheme::Gcs, key.parse::<GoogleConfigKey>().is_ok()),
        "AZURE" => (Scheme::Azure, key.parse::<AzureConfigKey>().is_ok()),
        _ => return None,
    };
    known.then_some(scheme)
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::Access;
    use crate::Location;

    #[test]
    fn files_are_named_by_settings_for_files_alone() {
        let access = Access::from_variables(
            [
                ("AWS_WEB_IDENTITY_TOKEN_FILE", "/run/token"),
                ("AWS_SECRET_ACCESS_KEY", "/not/a/path"),
                ("GOOGLE_SERVICE_ACCOUNT", "relative.json"),
            ]
            .map(|(name, value)| (name.to_owned(), value.to_owned())),
        );
        assert_eq!(access.files().collect::<Vec<_>>(), [std::path::Path::new("/run/token")]);
    }

    #[test]
    fn only_relevant_settings_are_taken_and_no_value_is_shown() {
        let variables = [
            ("AWS_SECRET_ACCESS_KEY", "hunter2"),
            ("AWS_ENDPOINT_URL", "http://localhost:9000"),
            ("AWS_PROFILE", "me"),
            ("GOOGLE_SERVICE_ACCOUNT", "hunter3"),
            ("GOOGLE_APPLICATION_CREDENTIALS", "/key.json"),
            ("AZURE_STORAGE_ACCOUNT_KEY", "hunter4"),
            ("PATH", "/bin"),
            ("SECRET_ACCESS_KEY", "hunter5"),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()));
        let all = Access::from_variables(variables);
        let names = |store: &str| -> Vec<String> {
            let access = all.for_location(&Location::parse(store).unwrap());
            assert!(!format!("{access:?}").contains("hunter"), "{access:?}");
            access.variables().map(|(name, _)| name.to_owned()).collect()
        };
        assert_eq!(names("s3://b"), ["AWS_ENDPOINT_URL", "AWS_SECRET_ACCESS_KEY"]);
        assert_eq!(names("gs://b"), ["GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT"]);
        assert_eq!(names("az://c"), ["AZURE_STORAGE_ACCOUNT_KEY"]);
        assert!(names("https://host/x").is_empty() && names("/srv").is_empty());
    }
}
