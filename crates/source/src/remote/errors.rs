use std::error;

use burgeon_block::{Error, ErrorKind};
use object_store::client::{HttpError, HttpErrorKind};

use super::wire::Wrong;
use crate::{
    location::{RemoteUrl, Scheme},
    web::{self, AccessDenied},
};

/// Address that a virtual machine asks for credentials when the environment has none.
const METADATA_SERVICE: &str = "169.254.169.254";

/// Converts an error of the library; `what` names the operation, as "read packs/ab".
///
/// The library's own message is not quoted: it may be pages of a server's HTML. Its chain is
/// searched for known causes; of a status, the number and the code are kept.
pub(super) fn ours(url: &RemoteUrl, what: &str, error: &object_store::Error) -> Error {
    use object_store::Error as Theirs;
    let (kind, why) = match error {
        Theirs::NotFound { .. } => (ErrorKind::NotFound, "it does not exist".to_owned()),
        Theirs::PermissionDenied { .. } | Theirs::Unauthenticated { .. } => {
            let why = status(error).unwrap_or_else(|| "access is denied".to_owned());
            // Credentials can be renewed, so a retry can help.
            return Error::with_source(
                ErrorKind::Unavailable,
                format!("cannot {what} of {url}"),
                AccessDenied(format!("{why}: {}", check(url))),
            );
        }
        Theirs::NotSupported { .. } | Theirs::NotImplemented { .. } => {
            (ErrorKind::Invalid, "the server does not support this operation".to_owned())
        }
        _ => by_cause(url, error),
    };
    Error::new(kind, format!("cannot {what} of {url}: {why}"))
}

fn by_cause(url: &RemoteUrl, error: &object_store::Error) -> (ErrorKind, String) {
    if let Some(wrong) = cause::<Wrong>(error) {
        return (wrong.kind(), wrong.to_string());
    }
    let chain = || std::iter::successors(error::Error::source(error), |error| error.source());
    if chain().any(|error| error.to_string().contains(METADATA_SERVICE)) {
        let why = format!("no credentials were found: {}", check(url));
        return (ErrorKind::Unavailable, why);
    }
    if let Some(http) = cause::<HttpError>(error) {
        let why = match http.kind() {
            HttpErrorKind::Connect => "no connection",
            HttpErrorKind::Timeout => "no answer in time",
            _ => "the connection broke off",
        };
        let remedy = match web::is_refusal(http) {
            true => format!(": {}", web::nobody_listens(endpoint(url))),
            false => String::new(),
        };
        return (ErrorKind::Unavailable, format!("{why}{}{remedy}", root_cause(http)));
    }
    match status(error) {
        Some(status) => (ErrorKind::Unavailable, status),
        None => {
            let text: String = error.to_string().chars().take(200).collect();
            (ErrorKind::Unavailable, text)
        }
    }
}

/// The first error of type `T` in the chain.
fn cause<T: error::Error + 'static>(error: &object_store::Error) -> Option<&T> {
    std::iter::successors(error::Error::source(error), |error| error.source())
        .find_map(|error| error.downcast_ref())
}

/// The deepest cause, such as "Connection refused (os error 111)".
fn root_cause(error: &HttpError) -> String {
    let chain = std::iter::successors(error::Error::source(error), |error| error.source());
    chain.last().map(|last| format!(" ({last})")).unwrap_or_default()
}

/// The status of a refusal and the code in its XML, as "503 Service Unavailable (SlowDown)".
fn status(error: &object_store::Error) -> Option<String> {
    let text = std::iter::successors(error::Error::source(error), |error| error.source())
        .map(ToString::to_string)
        .find(|text| text.contains("status code: "))?;
    let after = text.split_once("status code: ")?.1;
    let (status, body) = after.split_once(": ").unwrap_or((after, ""));
    let code = body
        .split_once("<Code>")
        .and_then(|(_, rest)| rest.split_once("</Code>"))
        .map(|(code, _)| code)
        .filter(|code| code.len() <= 64 && code.bytes().all(|byte| byte.is_ascii_alphanumeric()));
    let status: String = status.chars().take(40).collect();
    Some(match code {
        Some(code) => format!("the server answered {status} ({code})"),
        None => format!("the server answered {status}"),
    })
}

/// The address that requests to `url` go to, or the setting with it.
fn endpoint(url: &RemoteUrl) -> &str {
    match url.scheme {
        Scheme::S3 => "AWS_ENDPOINT_URL",
        Scheme::Http => url.address(),
        Scheme::Gcs | Scheme::Azure => "the endpoint in the environment",
    }
}

/// The settings to check when access is denied.
fn check(url: &RemoteUrl) -> &'static str {
    match url.scheme {
        Scheme::S3 => {
            "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN and the permissions of the key"
        }
        Scheme::Gcs => "check GOOGLE_APPLICATION_CREDENTIALS and the permissions of the account",
        Scheme::Azure => "check the AZURE_STORAGE_… variables and the permissions of the account",
        Scheme::Http => "the web server refuses requests without credentials",
    }
}
