//! Resolves the user's input to an image of a store, and checks the names that commands may give.
//!
//! ```text
//!   typed ─► a name of the store ─► a reference that was typed before ─► its end, such as python:3.12
//!         ─► the beginning of a digest, 4 hexadecimal digits at least
//! ```
//!
//! Invariants: an ambiguous input is refused; a reserved name is trusted only if this host's
//! provenance vouches for it; a taken name moves to another image only on the user's request.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use burgeon_block::{Digest, Error, ErrorKind, ObjectStore};
use burgeon_image::catalog::{
    self, ImageRecord, NamedPart, OciName, Provenance, ReservedName, is_reserved,
};
use burgeon_oci::Source;
use burgeon_source::{Form, Store, registry::Name};

use super::{Context, mistakes};

/// Fewest digits that are read as a digest.
const DIGITS_MIN: usize = 4;
/// Digits of a digest in lists and messages.
pub(super) const DIGITS_SHOWN: usize = 16;

/// The image that `typed` means, to be read: its content is trusted.
pub(super) fn trusted(context: &Context, store: &Store, typed: &str) -> Result<ImageRecord> {
    let record = resolve(context, store, typed)?;
    if !is_reserved(&record.name) || context.provenance().vouches_for(&record) {
        return Ok(record);
    }
    let what = format!(
        "{} lies in {}, but this host has not checked that its content is that of its name: \
         mount it by its reference (oci://…@{0}), which fetches and checks it",
        record.name,
        context.store_location()
    );
    Err(Error::new(ErrorKind::Invalid, what).into())
}

/// The image that `typed` means: a name, a reference, a tag or the beginning of a digest.
pub(super) fn resolve(context: &Context, store: &Store, typed: &str) -> Result<ImageRecord> {
    // No record has a query, and messages must not show it.
    let typed = public(typed);
    let none = match catalog::resolve(store, typed) {
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::Invalid) => e,
        found => return Ok(found?),
    };
    let Ok(images) = Images::read(store, &context.provenance()) else { return Err(none.into()) };
    let found = images.find(typed);
    match found.as_slice() {
        [] => Err(mistakes::explain(typed, none).into()),
        [image] => Ok(images.record(image).clone()),
        several => {
            let shown: Vec<_> = several.iter().take(8).map(|image| images.title(image)).collect();
            let what = format!(
                "{typed} is ambiguous, it may mean {}: type more of the name",
                shown.join(" or ")
            );
            Err(Error::new(ErrorKind::Invalid, what).into())
        }
    }
}

/// Predicate: `typed` means this image.
type IsMeant<'a> = &'a dyn Fn(&Digest, &Image) -> bool;

/// The images of a store by digest, with all their names and references.
pub(super) struct Images {
    by_digest: BTreeMap<Digest, Image>,
}

/// One image of a store.
#[derive(Default)]
pub(super) struct Image {
    /// Its records, by name; names that users gave come first.
    pub(super) records: Vec<ImageRecord>,
    /// References that users typed to get it.
    pub(super) references: BTreeSet<String>,
}

impl Images {
    /// Leaves out unreadable records.
    pub(super) fn read(store: &impl ObjectStore, provenance: &Provenance) -> Result<Self> {
        let records = catalog::list(store)?.into_iter().filter_map(|(_, record)| record.ok());
        Ok(Self::of(records, provenance))
    }

    pub(super) fn of(
        records: impl IntoIterator<Item = ImageRecord>,
        provenance: &Provenance,
    ) -> Self {
        let mut by_digest: BTreeMap<Digest, Image> = BTreeMap::new();
        for record in records {
            let Ok(digest) = record.digest() else { continue };
            by_digest.entry(digest).or_default().records.push(record);
        }
        for (digest, image) in &mut by_digest {
            image.records.sort_by_key(|record| (is_reserved(&record.name), record.name.clone()));
            image.references = provenance.of(digest).references;
        }
        Self { by_digest }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&Digest, &Image)> {
        self.by_digest.iter()
    }

    pub(super) fn get(&self, digest: &Digest) -> Option<&Image> {
        self.by_digest.get(digest)
    }

    fn record(&self, digest: &Digest) -> &ImageRecord {
        &self.by_digest[digest].records[0]
    }

    /// The user's name for the image.
    pub(super) fn title(&self, digest: &Digest) -> String {
        self.by_digest[digest].title()
    }

    /// All forms of the image on this host: complete, by index, by table of contents.
    fn forms(&self, digest: &Digest) -> BTreeSet<Digest> {
        fn original(record: &ImageRecord) -> Option<&str> {
            let name = ReservedName::oci(&record.name)?;
            (name.part == NamedPart::All).then_some(name.digest)
        }
        fn of(image: &Image) -> BTreeSet<&str> {
            image.records.iter().filter_map(original).collect()
        }
        let own = self.by_digest.get(digest).map(of).unwrap_or_default();
        let same = self.by_digest.iter().filter(|(_, image)| !own.is_disjoint(&of(image)));
        same.map(|(digest, _)| *digest).chain([*digest]).collect()
    }

    /// The images that `typed` may mean, other than by name.
    fn find(&self, typed: &str) -> Vec<Digest> {
        let reference = canonical(typed);
        let is_reference = |_: &Digest, image: &Image| image.references.contains(&reference);
        let is_tag = |_: &Digest, image: &Image| {
            let end = format!("/{typed}");
            image.references.iter().any(|reference| reference.ends_with(&end))
        };
        let whole = ReservedName::oci(typed).filter(|name| *name == OciName::of(name.digest));
        let hex = whole.map_or(typed, |name| name.hex());
        let is_hex = hex.len() >= DIGITS_MIN && hex.bytes().all(|b| b.is_ascii_hexdigit());
        let is_digest = |digest: &Digest, image: &Image| {
            let begins = |name: OciName<'_>| name.hex().starts_with(hex);
            let names = image.records.iter().filter_map(|it| ReservedName::oci(&it.name));
            let by_name = names.into_iter().any(begins);
            is_hex && (by_name || digest.to_string().starts_with(typed))
        };
        let all = |is: IsMeant<'_>| -> Vec<Digest> {
            let found = self.by_digest.iter().filter(|(digest, image)| is(digest, image));
            found.map(|(digest, _)| *digest).collect()
        };
        let ways: [IsMeant<'_>; 3] = [&is_reference, &is_tag, &is_digest];
        ways.into_iter().map(all).find(|found| !found.is_empty()).unwrap_or_default()
    }
}

impl Image {
    /// All names and references that users gave or typed for it; its first name if there are none.
    pub(super) fn titles(&self) -> Vec<String> {
        let given =
            self.records.iter().map(|record| &record.name).filter(|name| !is_reserved(name));
        let titles: Vec<String> = given.chain(&self.references).cloned().collect();
        if titles.is_empty() { vec![self.title()] } else { titles }
    }

    /// The user's name for it: a given name, else a typed reference, else its first name.
    pub(super) fn title(&self) -> String {
        let name = &self.records[0].name;
        match self.references.first() {
            Some(reference) if is_reserved(name) => reference.clone(),
            _ => name.clone(),
        }
    }
}

/// Everything that goes with a removed image.
pub(super) struct Removal {
    /// Names of the store.
    pub(super) names: Vec<String>,
    /// Typed references that no longer identify an image.
    pub(super) references: Vec<(Digest, String)>,
}

/// The records to remove for `typed`. A name stands for itself. A reference stands for all forms
/// of the OCI image on this host, unless another reference names the same image. A digest stands
/// for an image with one title only.
pub(super) fn to_remove(context: &Context, store: &Store, typed: &str) -> Result<Removal> {
    match catalog::resolve(store, typed) {
        // A damaged name can be removed, too.
        Ok(_) => return Ok(Removal { names: vec![typed.to_owned()], references: Vec::new() }),
        Err(e) if e.kind() == ErrorKind::Corrupt => {
            return Ok(Removal { names: vec![typed.to_owned()], references: Vec::new() });
        }
        Err(_) => {}
    }
    let digest = resolve(context, store, typed)?.digest()?;
    let images = Images::read(store, &context.provenance())?;
    let missing = || Error::new(ErrorKind::NotFound, format!("{typed} has just been removed"));
    let image = images.get(&digest).ok_or_else(missing)?;
    let forms = images.forms(&digest);
    let reference = canonical(typed);
    let end = format!("/{typed}");
    let is_meant = |known: &&String| **known == reference || known.ends_with(&end);
    let references = forms.iter().flat_map(|digest| {
        let of = images.get(digest).into_iter().flat_map(|image| &image.references);
        of.map(|reference| (*digest, reference.clone()))
    });
    let references: Vec<(Digest, String)> = references.collect();
    let reserved = forms.iter().filter_map(|digest| images.get(digest));
    let reserved = reserved.flat_map(|image| &image.records).map(|record| record.name.clone());
    let mut names: Vec<String> = reserved.filter(|name| is_reserved(name)).collect();
    if image.references.iter().any(|known| is_meant(&known)) {
        let (meant, others): (Vec<_>, Vec<_>) =
            references.into_iter().partition(|(_, known)| is_meant(&known));
        if !others.is_empty() {
            names.clear();
        }
        return Ok(Removal { names, references: meant });
    }
    let titles = image.titles();
    if titles.len() > 1 {
        let what = format!("{typed} is {}: remove it by each of these", titles.join(" and "));
        return Err(Error::new(ErrorKind::Invalid, what).into());
    }
    names.extend(titles.into_iter().filter(|t| image.records.iter().any(|r| r.name == *t)));
    names.sort();
    names.dedup();
    Ok(Removal { names, references })
}

/// The stored form of a reference: a registry's with its tag, a folder's with its absolute path;
/// without possible secrets.
pub(super) fn canonical(typed: &str) -> String {
    if !is_url(typed) {
        let (whole, part) = Source::split_part(typed);
        if !part.is_empty() {
            return canonical(whole) + part;
        }
    }
    if let Form::Layout(folder) = Form::of(typed) {
        let absolute = std::path::absolute(folder).ok();
        let absolute = absolute.and_then(|path| Some(path.to_str()?.to_owned()));
        return format!("oci-layout:{}", absolute.as_deref().unwrap_or(folder));
    }
    if is_url(typed) {
        return public(typed).to_owned();
    }
    let name = Name::parse(typed).or_else(|| Name::parse(&format!("oci://{typed}")));
    match name {
        Some(Ok(name)) => name.to_string(),
        _ => typed.to_owned(),
    }
}

fn is_url(typed: &str) -> bool {
    Form::of(typed) == Form::Web
}

/// The form of `typed` in messages: a URL without query and fragment, which may hold a token.
pub(super) fn public(typed: &str) -> &str {
    if is_url(typed) { typed.split(['?', '#']).next().unwrap_or_default() } else { typed }
}

/// The default local name of a pull: the end of the typed reference, as app:7 of
/// oci://registry.example/team/app:7. Never a name from inside the image.
pub(super) fn name_of(typed: &str) -> Result<String> {
    let Some(name) = Name::parse(typed) else { return Ok(typed.to_owned()) };
    let name = name?;
    let end = name.repository().rsplit('/').next().unwrap_or_default();
    let Some(tag) = name.tag_if_any() else {
        let what =
            format!("{typed} has no tag to name the image by: give it a local name with --as NAME");
        return Err(Error::new(ErrorKind::Invalid, what).into());
    };
    Ok(format!("{end}:{tag}"))
}

/// Checks that `name` may move from its present image to another one, and returns the present
/// image. `may_replace` tells whether that image may be replaced without `--replace`.
pub(super) fn check_free(
    store: &Store,
    name: &str,
    replace: bool,
    may_replace: impl FnOnce(&Digest) -> bool,
) -> Result<Option<ImageRecord>> {
    catalog::check_given_name(name)?;
    let taken = match catalog::resolve(store, name) {
        Ok(record) => record,
        // A damaged name belongs to nobody.
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::Corrupt) => return Ok(None),
        Err(e) => return Err(e.into()),
    };
    let digest = taken.digest()?;
    if replace || may_replace(&digest) {
        return Ok(Some(taken));
    }
    let what = format!(
        "the name {name:?} stands for another image (digest {}) that was not made by this command on \
         this host: --replace takes the name from it, or take another name",
        &digest.to_string()[..DIGITS_SHOWN]
    );
    Err(Error::new(ErrorKind::Invalid, what).into())
}
