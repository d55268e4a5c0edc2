//! The form of a container's files above a remote chain.
//!
//! | form | mounts | good for |
//! |---|---|---|
//! | overlay | an overlayfs above the chain's mount, which all share | many containers: shared page cache, no device each |
//! | native | a Burgeon mount of its own | reflinks, renames of folders, its own limit for writes |
//!
//! A label of the snapshot decides, then a pattern for the image's repository, then the node's
//! setting.

use std::str::FromStr;

use crate::model::{Labels, Snapshot};

/// The label that decides for one container: `overlay` or `native`.
const LABEL: &str = "containerd.io/snapshot/burgeon.containers";
/// The namespace of kubelet's containers.
const KUBERNETES: &str = "k8s.io";
const IMAGE: &str = "containerd.io/snapshot/cri.image-ref";

/// The form of containers that neither a label nor a pattern decides.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ContainerForm {
    /// Overlay in the namespace `k8s.io`, native in others.
    #[default]
    Auto,
    /// Always overlay.
    Overlay,
    /// Always native.
    Native,
}

impl FromStr for ContainerForm {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "overlay" => Ok(Self::Overlay),
            "native" => Ok(Self::Native),
            _ => Err(format!("{text:?} is none of auto, overlay, native")),
        }
    }
}

/// The forms of containers on this node.
#[derive(Clone, Debug, Default)]
pub struct Containers {
    /// The form if nothing else decides.
    pub form: ContainerForm,
    /// Patterns of repositories whose containers are native.
    pub native: Vec<String>,
    /// Patterns of repositories whose containers are overlay; they come first.
    pub overlay: Vec<String>,
}

impl Containers {
    /// True if a container with this key above the remote chain `parent` is native.
    pub(crate) fn is_native(&self, key: &str, labels: &Labels, parent: &Snapshot) -> bool {
        match labels.get(LABEL).map(String::as_str) {
            Some("native") => return true,
            Some("overlay") => return false,
            _ => {}
        }
        if let Some(image) = parent.labels.get(IMAGE) {
            let any = |all: &[String]| all.iter().any(|one| matches(one, repository(image)));
            if any(&self.overlay) {
                return false;
            }
            if any(&self.native) {
                return true;
            }
        }
        match self.form {
            ContainerForm::Overlay => false,
            ContainerForm::Native => true,
            ContainerForm::Auto => namespace(key).is_some_and(|name| name != KUBERNETES),
        }
    }
}

/// The namespace of a key of containerd's: NAMESPACE/NUMBER/KEY.
fn namespace(key: &str) -> Option<&str> {
    let (name, rest) = key.split_once('/')?;
    rest.split_once('/')?.0.parse::<u64>().ok().map(|_| name)
}

/// `REGISTRY/REPOSITORY` of an image's name.
pub fn repository(image: &str) -> &str {
    let name = image.split_once('@').map_or(image, |(name, _)| name);
    match name.rsplit_once(':') {
        // Else it is a port.
        Some((before, tag)) if !tag.contains('/') => before,
        _ => name,
    }
}

/// True if all of `text` matches; `*` stands for any characters.
pub fn matches(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = text.strip_prefix(first) else { return false };
    let Some(last) = parts.next_back() else { return rest.is_empty() };
    for part in parts {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::{ContainerForm, Containers, matches, repository};
    use crate::model::{Labels, SnapshotKind, Snapshots};

    #[test]
    fn a_repository_is_the_name_without_tag_and_digest() {
        for image in
            ["r.example:5000/a/b", "r.example:5000/a/b:1", "r.example:5000/a/b:1@sha256:ab"]
        {
            assert_eq!(repository(image), "r.example:5000/a/b");
        }
        assert_eq!(repository("docker.io/library/python:3.12"), "docker.io/library/python");
    }

    #[test]
    fn a_pattern_matches_whole_names() {
        let yes =
            [("r/a", "r/a"), ("r/*", "r/a/b"), ("*", "x"), ("r/*/b*", "r/a/bc"), ("r/**", "r/")];
        let no = [("r/a", "r/ab"), ("r/*", "x/r/a"), ("", "r"), ("*b", "r/bc"), ("ab*ba", "aba")];
        yes.iter().for_each(|(pattern, text)| assert!(matches(pattern, text), "{pattern} {text}"));
        no.iter().for_each(|(pattern, text)| assert!(!matches(pattern, text), "{pattern} {text}"));
    }

    #[test]
    fn a_label_goes_before_a_pattern_and_a_pattern_before_the_namespace() {
        let labels = |key: &str, value: &str| Labels::from([(key.to_owned(), value.to_owned())]);
        let image = labels(super::IMAGE, "r.example/team/app:1");
        let now = std::time::SystemTime::UNIX_EPOCH;
        let parent =
            Snapshots::default().plan_create(SnapshotKind::View, "c", None, image, now).unwrap();
        let of = |containers: &Containers, key: &str, label: Option<&str>| {
            let labels = label.map(|form| labels(super::LABEL, form)).unwrap_or_default();
            containers.is_native(key, &labels, &parent)
        };
        let auto = Containers::default();
        assert!(of(&auto, "default/7/x", None) && !of(&auto, "k8s.io/7/x", None));
        assert!(!of(&auto, "other", None) && !of(&auto, "a/b/c", None), "no key of containerd");
        assert!(of(&auto, "k8s.io/7/x", Some("native")) && !of(&auto, "d/7/x", Some("overlay")));
        let patterns = vec!["r.example/team/*".to_owned()];
        let native = Containers { native: patterns.clone(), ..Containers::default() };
        assert!(of(&native, "k8s.io/7/x", None) && !of(&native, "k8s.io/7/x", Some("overlay")));
        let both = Containers { overlay: patterns, form: ContainerForm::Native, ..native };
        assert!(!of(&both, "d/7/x", None) && of(&both, "d/7/x", Some("native")));
    }
}
