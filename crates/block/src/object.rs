use std::fmt;

use crate::{Digest, Error, ErrorKind, Result};

/// The name of an object, such as `packs/ab12…`: relative, `/`-separated. Its first part says what
/// the object is ([`ObjectKind`]), and is read once, here.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectId {
    name: String,
    kind: Option<ObjectKind>,
}

impl ObjectId {
    /// Longest name, in bytes.
    pub const LEN_MAX: usize = 1024;

    /// Checks that the name cannot leave its store: no empty, `.` or `..` part, no leading `/`,
    /// no NUL, at most [`Self::LEN_MAX`] bytes.
    pub fn new(name: impl Into<String>) -> Result<Self> {
        let name = name.into();
        let safe = name.len() <= Self::LEN_MAX
            && !name.contains('\0')
            && name.split('/').all(|part| !matches!(part, "" | "." | ".."));
        if safe {
            let kind = name.split_once('/').and_then(|(folder, _)| ObjectKind::of_folder(folder));
            Ok(Self { name, kind })
        } else {
            Err(Error::new(ErrorKind::Invalid, format!("{name:?} is not an object name")))
        }
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.name
    }

    /// What the object is; `None` for names that this version does not know.
    pub fn kind(&self) -> Option<ObjectKind> {
        self.kind
    }

    /// Whether the object is a `kind`.
    pub fn is(&self, kind: ObjectKind) -> bool {
        self.kind == Some(kind)
    }

    /// The name below the folder of `kind`; `None` if the object is no `kind`.
    pub fn below(&self, kind: ObjectKind) -> Option<&str> {
        self.is(kind).then(|| &self.name[kind.folder().len() + 1..])
    }

    /// The digest that names the object; `None` if the object is no `kind` or has another name.
    pub fn digest(&self, kind: ObjectKind) -> Option<Digest> {
        self.below(kind)?.parse().ok()
    }

    /// Whether the bytes lie outside the store of the image that refers to them: in files of this
    /// host, or in layers elsewhere. Only an image that this host trusts may refer to them.
    pub fn is_outside_store(&self) -> bool {
        matches!(self.kind, Some(ObjectKind::File | ObjectKind::Derived))
    }
}

impl fmt::Display for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl fmt::Debug for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ObjectId").field(&self.name).finish()
    }
}

/// What an object is. Each kind has a folder of its own in a store, or in place of one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum ObjectKind {
    /// `packs/<digest>`: chunks.
    Pack,
    /// `manifests/<digest>`: the manifest of an image.
    Manifest,
    /// `images/<name>`: the record of an image's name.
    Name,
    /// `profiles/<digest of a manifest>`: the profile of an image.
    Profile,
    /// `roots/<host>`: the manifests that a host needs.
    Roots,
    /// `leases/…`: a writer or a collector at work in a bucket.
    Lease,
    /// `derived/<digest>`: data that is unpacked from the layers of an OCI image. The object of
    /// the store with this name is the table that says how.
    Derived,
    /// `origins/<digest of a table>`: the place of the layers of a derived object.
    Origins,
    /// `held/<digest of a table>`: the layers of a derived object that the store holds.
    Held,
    /// `layers/<SHA-256>`: a layer of an OCI image, as it came.
    Layer,
    /// `file/<path>`: a file or block device of this host, in no store.
    File,
    /// `computed/<pattern>`: bytes that are made up, in no store.
    Computed,
}

impl ObjectKind {
    const ALL: [Self; 12] = [
        Self::Pack,
        Self::Manifest,
        Self::Name,
        Self::Profile,
        Self::Roots,
        Self::Lease,
        Self::Derived,
        Self::Origins,
        Self::Held,
        Self::Layer,
        Self::File,
        Self::Computed,
    ];

    /// The first part of the names of such objects.
    pub const fn folder(self) -> &'static str {
        match self {
            Self::Pack => "packs",
            Self::Manifest => "manifests",
            Self::Name => "images",
            Self::Profile => "profiles",
            Self::Roots => "roots",
            Self::Lease => "leases",
            Self::Derived => "derived",
            Self::Origins => "origins",
            Self::Held => "held",
            Self::Layer => "layers",
            Self::File => "file",
            Self::Computed => "computed",
        }
    }

    fn of_folder(folder: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.folder() == folder)
    }

    /// The object of this kind with the name `name` below its folder. `Invalid` if that could
    /// leave the folder.
    pub fn object(self, name: impl fmt::Display) -> Result<ObjectId> {
        ObjectId::new(format!("{}/{name}", self.folder()))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::{ObjectId, ObjectKind};

    #[test]
    fn object_names_cannot_leave_their_store() {
        for bad in ["", "/etc/passwd", "..", "a/../b", "a//b", "a/", "./a", "a\0b"] {
            assert!(ObjectId::new(bad).is_err(), "{bad:?}");
        }
        assert!(ObjectId::new("a".repeat(1025)).is_err());
        assert!(ObjectId::new("packs/00ff").is_ok());
        for bad in ["", "..", "/etc", "a/../../b"] {
            assert!(ObjectKind::File.object(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn the_folder_of_a_name_is_its_kind() {
        let folders: HashSet<_> = ObjectKind::ALL.iter().map(|kind| kind.folder()).collect();
        assert_eq!(folders.len(), ObjectKind::ALL.len());
        for kind in ObjectKind::ALL {
            let object = kind.object("a/b").unwrap();
            assert_eq!(ObjectId::new(object.as_str()).unwrap(), object);
            assert_eq!((object.kind(), object.below(kind)), (Some(kind), Some("a/b")));
        }
        for unknown in ["packs", "pack/a", "Packs/a", "files/etc", "x/packs/a"] {
            assert_eq!(ObjectId::new(unknown).unwrap().kind(), None, "{unknown}");
        }
    }

    #[test]
    fn only_files_and_derived_data_are_outside_the_store() {
        let outside = |kind: &ObjectKind| kind.object("x").unwrap().is_outside_store();
        let outside: Vec<_> = ObjectKind::ALL.into_iter().filter(outside).collect();
        assert_eq!(outside, [ObjectKind::Derived, ObjectKind::File]);
        assert!(!ObjectId::new("file").unwrap().is_outside_store());
    }

    #[test]
    fn a_digest_is_the_whole_name_below_the_folder() {
        let digest = crate::Digest::of(b"x");
        let pack = ObjectKind::Pack.object(digest).unwrap();
        assert_eq!(pack.digest(ObjectKind::Pack), Some(digest));
        assert_eq!(pack.digest(ObjectKind::Manifest), None);
        assert_eq!(ObjectKind::Pack.object("x").unwrap().digest(ObjectKind::Pack), None);
    }
}
