//! The form of a text that names an image or a place of images, told by how it begins.
//!
//! The one place that knows the prefixes: parsers and messages ask it.

/// The form of a text; what follows the prefix is not checked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form<'a> {
    /// `oci-layout:` and a folder, which follows.
    Layout(&'a str),
    /// `oci://` or `oci+http://`: a repository of a registry.
    Registry,
    /// `http://` or `https://`: a file of a web server.
    Web,
    /// Another URL, of a store.
    Store,
    /// Anything else: a name, or a path.
    Name,
}

impl<'a> Form<'a> {
    /// The form of `text`.
    pub fn of(text: &'a str) -> Self {
        if let Some(folder) = text.strip_prefix("oci-layout:") {
            return Self::Layout(folder);
        }
        match text.split_once("://").map(|(scheme, _)| scheme) {
            Some("oci" | "oci+http") => Self::Registry,
            Some("http" | "https") => Self::Web,
            Some(_) => Self::Store,
            None => Self::Name,
        }
    }

    /// True if what it names is reached over a network, or in a bucket.
    pub fn is_url(self) -> bool {
        matches!(self, Self::Registry | Self::Web | Self::Store)
    }
}

#[cfg(test)]
mod tests {
    use super::Form;

    #[test]
    fn a_form_is_told_by_its_beginning() {
        for (text, form) in [
            ("oci-layout:/a:1", Form::Layout("/a:1")),
            ("oci-layout:a://b", Form::Layout("a://b")),
            ("oci://r.example/a:1", Form::Registry),
            ("oci+http://localhost:5000/a", Form::Registry),
            ("https://h/x.tar", Form::Web),
            ("http://h/x.tar", Form::Web),
            ("s3://bucket", Form::Store),
            ("oci:x", Form::Name),
            ("debian:12", Form::Name),
            ("", Form::Name),
        ] {
            assert_eq!(Form::of(text), form, "{text}");
        }
        assert!(Form::Store.is_url() && !Form::Layout("a://b").is_url());
    }
}
