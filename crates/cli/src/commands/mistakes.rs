//! First mistakes: guesses the intended command for a name that does not exist.

use std::path::Path;

use burgeon_block::{Error, ErrorKind};
use burgeon_source::registry::Name;

use crate::exit::Usage;

/// The error for the missing image `typed`, with a suggestion if one can be guessed.
pub(super) fn explain(typed: &str, none: Error) -> Error {
    match meant(typed) {
        Some(meant) => {
            Error::new(ErrorKind::NotFound, format!("there is no image {typed:?}: {meant}"))
        }
        None => none,
    }
}

/// The error for swapped arguments of `verb`.
pub(super) fn swapped(verb: &str, first: &str, second: &str) -> Usage {
    Usage(format!("the arguments are swapped: burgeon {verb} {first} {second}"))
}

/// The probable input instead of the image `typed`.
pub(super) fn meant(typed: &str) -> Option<String> {
    for other in ["docker://", "docker-daemon:", "registry://", "containers-storage:"] {
        if let Some(rest) = typed.strip_prefix(other) {
            let rest = rest.trim_start_matches('/');
            return Some(match with_registry(rest) {
                Some(name) => format!("an image of a registry is {name}"),
                None => "an image of a registry is oci://REGISTRY/REPOSITORY:TAG".to_owned(),
            });
        }
    }
    if let Some(rest) = typed.strip_prefix("oci:").filter(|rest| !rest.starts_with("//")) {
        return Some(format!("an image of a folder is oci-layout:{rest}"));
    }
    if let Some(rest) =
        ["oci-archive:", "docker-archive:"].iter().find_map(|p| typed.strip_prefix(p))
    {
        let file = rest.split(':').next().unwrap_or_default();
        return Some(format!(
            "unpack it to a folder first: skopeo copy {typed} oci:DIR:TAG, then oci-layout:DIR:TAG (the \
             file was {file})"
        ));
    }
    if let Some((scheme, rest)) = typed.split_once("://") {
        if !matches!(scheme, "s3" | "gs" | "az" | "file") {
            return None;
        }
        let (store, image) = rest.trim_end_matches('/').rsplit_once('/').unwrap_or((rest, "NAME"));
        return Some(format!(
            "{scheme}://… is a store: its images are named with it, as in `{image} --store \
             {scheme}://{store}`"
        ));
    }
    let path = Path::new(typed);
    let is_path = typed.starts_with(['/', '.', '~']) || typed.ends_with('/');
    if path.is_dir() && path.join("oci-layout").is_file() {
        return Some(format!("it is a folder with images: oci-layout:{typed}"));
    }
    if path.is_dir() && (is_path || typed.contains('/')) {
        return Some(format!(
            "it is a directory: make an image of it first, `burgeon build {typed} NAME`"
        ));
    }
    if path.is_file() {
        return Some(format!(
            "it is a file: make an image of it first, `burgeon build {typed} NAME`"
        ));
    }
    if is_path {
        return Some("it is a path, and nothing is there".to_owned());
    }
    with_registry(typed).map(|name| format!("an image of a registry is {name}"))
}

/// `oci://…` for input that begins with the name of a registry.
fn with_registry(typed: &str) -> Option<String> {
    let (host, _) = typed.split_once('/')?;
    if !host.contains(['.', ':']) && host != "localhost" {
        return None;
    }
    let name = format!("oci://{typed}");
    Name::parse(&name)?.ok().map(|_| name)
}

#[cfg(test)]
mod tests {
    use super::meant;

    #[test]
    fn mistakes_are_answered_by_what_to_type() {
        for (typed, answer) in [
            ("docker.io/python:3.12", "oci://docker.io/python:3.12"),
            ("docker://docker.io/python:3.12", "oci://docker.io/python:3.12"),
            ("docker://python", "oci://REGISTRY"),
            ("localhost/app", "oci://localhost/app"),
            ("oci:/srv/layout:1", "oci-layout:/srv/layout:1"),
            ("oci-archive:/srv/x.tar:1", "skopeo copy"),
            ("s3://bucket/images/debian:12", "`debian:12 --store s3://bucket/images`"),
            ("./nothing-here", "nothing is there"),
            ("/usr", "burgeon build /usr NAME"),
            ("/etc/passwd", "burgeon build /etc/passwd NAME"),
        ] {
            let meant = meant(typed).unwrap_or_default();
            assert!(meant.contains(answer), "{typed}: {meant}");
        }
        for typed in ["debian:12", "team/app", "sha256:abc"] {
            assert_eq!(meant(typed), None);
        }
    }
}
