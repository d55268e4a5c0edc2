//! The place of a chain's layers, as the snapshotter's records and messages hold it.
//!
//! ```text
//!   [checked ]oci://REPOSITORY@DIGEST#chain=sha256:…
//!    └ all layers were read here: no table of contents of their publisher is used
//! ```
//!
//! The text is a format: records of earlier versions have it. It is made and read here alone.

use std::fmt;

use burgeon_oci::Source;

const CHECKED: &str = "checked ";
const CHAIN: &str = "#chain=";

/// A source of a chain.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct ChainSource<'a> {
    /// The image, `oci://REPOSITORY@DIGEST`.
    pub(super) image: &'a str,
    /// The chain ID; `None` in text that this program has not made.
    pub(super) chain: Option<&'a str>,
    /// All layers of the image were read here, and it has an index here.
    pub(super) is_verified: bool,
}

impl<'a> ChainSource<'a> {
    /// Reads the text of a source.
    pub(super) fn parse(text: &'a str) -> Self {
        let (is_verified, reference) = match text.strip_prefix(CHECKED) {
            Some(reference) => (true, reference),
            None => (false, text),
        };
        let (image, part) = Source::split_part(reference);
        Self { image, chain: part.strip_prefix(CHAIN), is_verified }
    }

    /// The options and the name by which `burgeon mount` mounts the chain.
    pub(super) fn to_mount(&self) -> Vec<String> {
        let option = self.is_verified.then(|| "--checked".to_owned());
        option.into_iter().chain([self.reference()]).collect()
    }

    fn reference(&self) -> String {
        match self.chain {
            Some(chain) => format!("{}{CHAIN}{chain}", self.image),
            None => self.image.to_owned(),
        }
    }
}

impl fmt::Display for ChainSource<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let checked = if self.is_verified { CHECKED } else { "" };
        write!(f, "{checked}{}", self.reference())
    }
}

#[cfg(test)]
mod tests {
    use super::ChainSource;

    #[test]
    fn a_source_is_read_as_it_was_written() {
        let image = "oci://r.example:5000/a/b@sha256:00ff";
        for (text, is_verified, chain) in [
            (format!("{image}#chain=sha256:11"), false, Some("sha256:11")),
            (format!("checked {image}#chain=sha256:11"), true, Some("sha256:11")),
            (image.to_owned(), false, None),
        ] {
            let source = ChainSource::parse(&text);
            assert_eq!(source, ChainSource { image, chain, is_verified });
            assert_eq!(source.to_string(), text);
            let mount = source.to_mount();
            assert_eq!(mount.first().is_some_and(|it| it == "--checked"), is_verified);
            assert!(mount.last().is_some_and(|it| text.ends_with(it) && it.starts_with(image)));
        }
    }
}
