//! Builds a client of the library from a location and the settings of the environment.

use std::{sync::Arc, time::Duration};

use burgeon_block::{Error, ErrorKind, Result};
use object_store::{
    BackoffConfig, ClientConfigKey, ClientOptions, ObjectStore, RetryConfig,
    aws::{AmazonS3Builder, AmazonS3ConfigKey},
    azure::{AzureConfigKey, MicrosoftAzureBuilder},
    gcp::{GoogleCloudStorageBuilder, GoogleConfigKey},
    http::HttpBuilder,
};

use super::{
    key_files,
    wire::{Connector, Traffic},
};
use crate::{
    Access,
    location::{RemoteUrl, Scheme},
    web::choose_cryptography,
};

/// Longest time to connect. A lost SYN is sent again after 1 s and 3 s.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest time without data from the server.
const SILENCE_MAX: Duration = Duration::from_secs(10);
/// Longest time for one request, its body included: a pack of 32 MiB at 1 Mbit/s.
const REQUEST_MAX: Duration = Duration::from_secs(300);
/// Time for which a command retries: the same as for a reader of a mount.
const RETRY_MAX: Duration = Duration::from_secs(30);
/// Retries of a command, with pauses of 0.1, 0.2, … 3.2 s: after about 6 s a wrong address is
/// reported.
const RETRIES: usize = 6;

/// The layer that retries when the store does not answer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Retries {
    /// The library, within [`RETRY_MAX`].
    Library,
    /// The caller: a volume has its own deadline, pauses and retries.
    Caller,
}

/// A client of the store at `url`. Opens no connection yet.
pub(super) fn client(
    url: &RemoteUrl,
    access: &Access,
    retries: Retries,
    traffic: &Arc<Traffic>,
) -> Result<Arc<dyn ObjectStore>> {
    choose_cryptography();
    access
        .variables()
        .try_for_each(|(name, value)| key_files::check(&name.to_ascii_lowercase(), value))?;
    let connector = Connector(Arc::clone(traffic));
    let parts = (retry_config(retries), client_options(retries), connector);
    let client = match url.scheme {
        Scheme::S3 => s3(url, access, parts),
        Scheme::Gcs => google(url, access, parts),
        Scheme::Azure => azure(url, access, parts),
        Scheme::Http => http(url, parts),
    };
    client.map_err(|e| {
        let hint = match url.scheme {
            Scheme::S3 => "check AWS_REGION, AWS_ENDPOINT_URL and the other AWS_… variables",
            Scheme::Gcs => "check GOOGLE_APPLICATION_CREDENTIALS and the other GOOGLE_… variables",
            Scheme::Azure => "check AZURE_STORAGE_ACCOUNT_NAME and the other AZURE_… variables",
            Scheme::Http => "check the URL",
        };
        // The library's message could quote a setting, so it is not repeated.
        drop(e);
        Error::new(ErrorKind::Invalid, format!("the settings for {url} make no sense: {hint}"))
    })
}

type Parts = (RetryConfig, ClientOptions, Connector);
type Built = object_store::Result<Arc<dyn ObjectStore>>;

/// The settings in the environment, by the names that the library knows.
fn settings(access: &Access) -> impl Iterator<Item = (String, String)> + '_ {
    access.variables().map(|(name, value)| {
        let name = name.to_ascii_lowercase();
        let value = key_files::usable(&name, value.to_owned());
        (name, value)
    })
}

fn s3(url: &RemoteUrl, access: &Access, (retry, options, connector): Parts) -> Built {
    // Options first: a setting of the environment overrides one of them.
    let mut builder = AmazonS3Builder::new().with_client_options(options);
    for (name, value) in settings(access) {
        let Ok(key) = name.parse::<AmazonS3ConfigKey>() else { continue };
        let is_service = matches!(
            key,
            AmazonS3ConfigKey::Endpoint
                | AmazonS3ConfigKey::S3Endpoint
                | AmazonS3ConfigKey::StsEndpoint
        );
        if is_service && value.starts_with("http://") {
            // An http:// metadata service does not allow http:// for the store's own requests.
            let plain = AmazonS3ConfigKey::Client(ClientConfigKey::AllowHttp);
            builder = builder.with_config(plain, "true");
        }
        builder = builder.with_config(key, value);
    }
    let builder = builder.with_bucket_name(url.bucket()).with_retry(retry);
    builder.with_http_connector(connector).build().map(|store| Arc::new(store) as _)
}

fn google(url: &RemoteUrl, access: &Access, (retry, options, connector): Parts) -> Built {
    let mut builder = GoogleCloudStorageBuilder::new().with_client_options(options);
    // A setting of the environment overrides it.
    for (name, value) in key_files::google_default().into_iter().chain(settings(access)) {
        let Ok(key) = name.parse::<GoogleConfigKey>() else { continue };
        builder = builder.with_config(key, value);
    }
    let builder = builder.with_bucket_name(url.bucket()).with_retry(retry);
    builder.with_http_connector(connector).build().map(|store| Arc::new(store) as _)
}

fn azure(url: &RemoteUrl, access: &Access, (retry, options, connector): Parts) -> Built {
    let mut builder = MicrosoftAzureBuilder::new().with_client_options(options);
    for (name, value) in settings(access) {
        let Ok(key) = name.parse::<AzureConfigKey>() else { continue };
        if key == AzureConfigKey::Endpoint && value.starts_with("http://") {
            let plain = AzureConfigKey::Client(ClientConfigKey::AllowHttp);
            builder = builder.with_config(plain, "true");
        }
        builder = builder.with_config(key, value);
    }
    let builder = builder.with_container_name(url.bucket()).with_retry(retry);
    builder.with_http_connector(connector).build().map(|store| Arc::new(store) as _)
}

fn http(url: &RemoteUrl, (retry, options, connector): Parts) -> Built {
    let address = url.to_string();
    let options = options.with_allow_http(url.is_plain_http());
    let builder = HttpBuilder::new().with_url(address).with_client_options(options);
    let builder = builder.with_retry(retry).with_http_connector(connector);
    builder.build().map(|store| Arc::new(store) as _)
}

fn client_options(retries: Retries) -> ClientOptions {
    let options = ClientOptions::new()
        .with_connect_timeout(CONNECT_TIMEOUT)
        .with_read_timeout(SILENCE_MAX)
        .with_timeout(REQUEST_MAX);
    match retries {
        // Keeps a connection for each in-flight fetch: making one costs up to three round trips.
        Retries::Caller => options.with_pool_max_idle_per_host(super::REQUESTS_MAX),
        Retries::Library => options,
    }
}

fn retry_config(retries: Retries) -> RetryConfig {
    match retries {
        Retries::Library => RetryConfig {
            backoff: BackoffConfig {
                init_backoff: Duration::from_millis(100),
                max_backoff: Duration::from_secs(5),
                base: 2.0,
            },
            max_retries: RETRIES,
            retry_timeout: RETRY_MAX,
        },
        Retries::Caller => RetryConfig { max_retries: 0, ..RetryConfig::default() },
    }
}
