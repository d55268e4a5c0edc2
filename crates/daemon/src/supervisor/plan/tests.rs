//! Plans of mounts on a real image that was prepared before, so that no process is started.

use std::{cell::RefCell, fs};

use burgeon_block::{Digest, ErrorKind};
use burgeon_image::{ManifestLimits, Wanted, builder, catalog};
use burgeon_source::{Directory, Location};

use super::{Plan, image_of};
use crate::{
    id::{Fsid, MountId},
    ipc::protocol::{MountRequest, SproutRequest, WritesRequest},
    state::{
        files, paths::StateDir, prepared::Ready, record::WritesState, space::LIMIT_MIN, writes,
    },
    supervisor::tests::request,
};

/// A state directory whose store has the image `image`, prepared.
struct Prepared {
    _folder: tempfile::TempDir,
    state: StateDir,
    store: Location,
    digest: Digest,
}

impl Prepared {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let state = StateDir::open(&folder.path().join("state")).unwrap();
        let tree = folder.path().join("tree");
        fs::create_dir(&tree).unwrap();
        fs::write(tree.join("file"), "content").unwrap();
        let prepared = Self {
            store: state.store().into(),
            digest: Digest::of(b"not built yet"),
            state,
            _folder: folder,
        };
        Self { digest: prepared.build(&tree, "image"), ..prepared }
    }

    /// Builds the image `name` of `tree` and prepares it.
    fn build(&self, tree: &std::path::Path, name: &str) -> Digest {
        let store = Directory::create(self.state.store()).unwrap();
        let options = builder::BuildOptions::default();
        let report = builder::from_directory(&store, name, tree, &options, &|_| ()).unwrap();
        let digest = report.image.digest().unwrap();
        let folder = self.state.image(&digest);
        fs::create_dir_all(&folder).unwrap();
        let wanted = Wanted::default();
        burgeon_image::prepare(
            &store,
            &digest,
            &folder,
            wanted,
            &ManifestLimits::default(),
            drop,
            || (),
        )
        .unwrap();
        let ready = Ready::now(&self.store, &folder);
        files::publish_json(&folder.join("ready.json"), &ready).unwrap();
        digest
    }

    fn plan(&self, id: MountId, request: &MountRequest) -> burgeon_block::Result<Plan> {
        fs::create_dir_all(self.state.mount(id)).unwrap();
        Plan::make(&self.state, request, &self.store, id, &|_, _, _| ())
    }

    /// The message of the error of a plan, which must be of `kind`.
    fn refusal(&self, request: &MountRequest, kind: ErrorKind) -> String {
        let refused = self.plan(MountId::from_number(99), request).err().unwrap();
        assert_eq!(refused.kind(), kind, "{refused}");
        refused.to_string()
    }
}

fn kept(name: Option<&str>) -> WritesRequest {
    let name = name.map(str::to_owned);
    WritesRequest::Kept(SproutRequest { name, limit: Some(LIMIT_MIN), thin: true, device: None })
}

#[test]
fn a_read_only_mount_is_planned_on_a_prepared_image() {
    let prepared = Prepared::new();
    let (id, mapped) = (MountId::from_number(1), RefCell::new(None));
    fs::create_dir(prepared.state.mount(id)).unwrap();
    let on_map: super::OnMapped<'_> =
        &|digest, map, _| *mapped.borrow_mut() = Some((digest, map.to_owned()));
    let request = request("image", WritesRequest::ReadOnly);
    let mut plan = Plan::make(&prepared.state, &request, &prepared.store, id, on_map).unwrap();
    let folder = prepared.state.image(&prepared.digest);
    assert_eq!(mapped.take(), Some((prepared.digest, folder.join("map"))));
    assert_eq!((plan.base.digest, &plan.base.folder), (prepared.digest, &folder));
    assert_eq!(plan.state(), WritesState::ReadOnly);
    assert!(plan.lock.is_none() && plan.area.is_none());
    plan.reserve(&prepared.state).unwrap();
    plan.sprouted(&prepared.state, Fsid::random().unwrap()).unwrap();
    assert_eq!(writes::names(&prepared.state).unwrap(), [""; 0]);
}

#[test]
fn an_image_is_found_by_name_or_by_a_checked_digest() {
    let prepared = Prepared::new();
    let read_only = |image: &str| request(image, WritesRequest::ReadOnly);
    let unknown = prepared.refusal(&read_only("other"), ErrorKind::NotFound);
    assert!(unknown.contains("there is no image"), "{unknown}");
    // Anyone with access to the store can set such a name.
    let reserved = format!("sha256:{}", "00".repeat(32));
    let store = Directory::create(prepared.state.store()).unwrap();
    let image = catalog::resolve(&store, "image").unwrap();
    catalog::publish_alias(&store, &image, &reserved).unwrap();
    let refused = prepared.refusal(&read_only(&reserved), ErrorKind::NotFound);
    assert!(refused.contains("this host has checked no image"), "{refused}");
    let known = MountRequest { digest: Some(prepared.digest.into()), ..read_only(&reserved) };
    let plan = prepared.plan(MountId::from_number(1), &known).unwrap();
    assert_eq!(plan.base.digest, prepared.digest);
}

#[test]
fn unnamed_writes_lie_in_the_folder_of_their_mount() {
    let prepared = Prepared::new();
    let id = MountId::from_number(1);
    let mut plan = prepared.plan(id, &request("image", kept(None))).unwrap();
    plan.reserve(&prepared.state).unwrap();
    let path = prepared.state.mount(id).join("sprout");
    assert_eq!(fs::metadata(&path).unwrap().len(), LIMIT_MIN);
    let WritesState::Sprout(sprout) = plan.state() else { panic!("no sprout") };
    assert_eq!((sprout.name, sprout.path, sprout.reserved), (None, path, LIMIT_MIN));
    assert_eq!(plan.base.folder, prepared.state.image(&prepared.digest));
}

#[test]
fn named_writes_keep_their_base_and_are_planned_again_as_they_are_recorded() {
    let prepared = Prepared::new();
    let (state, fsid) = (&prepared.state, Fsid::random().unwrap());
    let named = request("image", kept(Some("w")));
    let mut plan = prepared.plan(MountId::from_number(1), &named).unwrap();
    let refused = prepared.refusal(&named, ErrorKind::Unavailable);
    assert!(refused.contains("mounted already"), "{refused}");
    plan.reserve(state).unwrap();
    let folder = writes::folder(state, "w");
    assert_eq!(plan.base.folder, folder, "the mount is made from the kept files");
    for file in ["seed", "seed.info", "map", "manifest", "sprout"] {
        assert!(folder.join(file).is_file(), "{file}");
    }
    assert!(!writes::find(state, "w").unwrap().unwrap().sprouted);
    plan.sprouted(state, fsid).unwrap();
    plan.undo(state);
    let record = writes::find(state, "w").unwrap().unwrap();
    assert_eq!((record.sprouted, record.sprout_fsid), (true, Some(fsid)));
    assert_eq!((record.manifest.0, record.seed_fsid), (prepared.digest, plan.seed_fsid));
    drop(plan);

    // The image's name means another image now.
    let tree = prepared._folder.path().join("tree");
    fs::write(tree.join("file"), "other content").unwrap();
    assert_ne!(prepared.build(&tree, "image"), prepared.digest);
    let larger = SproutRequest {
        name: Some("w".to_owned()),
        limit: Some(2 * LIMIT_MIN),
        ..SproutRequest::default()
    };
    let again = request("image", WritesRequest::Kept(larger));
    let plan = prepared.plan(MountId::from_number(2), &again).unwrap();
    assert_eq!((plan.base.digest, plan.seed_fsid), (prepared.digest, record.seed_fsid));
    let sprout = plan.sprout.as_ref().unwrap();
    assert_eq!((sprout.limit, sprout.is_new, sprout.thin), (LIMIT_MIN, false, true));
    let said = plan.notes.join("\n");
    assert!(said.contains("stay on their earlier image"), "{said}");
    assert!(said.contains("the write limit stays at"), "{said}");
}

#[test]
fn named_writes_are_refused_on_another_image_or_with_another_area() {
    let prepared = Prepared::new();
    let state = &prepared.state;
    let named = request("image", kept(Some("w")));
    let mut plan = prepared.plan(MountId::from_number(1), &named).unwrap();
    plan.reserve(state).unwrap();
    plan.sprouted(state, Fsid::random().unwrap()).unwrap();
    drop(plan);
    let other = request("other", kept(Some("w")));
    let refused = prepared.refusal(&other, ErrorKind::Invalid);
    assert!(refused.contains("were made on the image \"image\", not on \"other\""), "{refused}");
    let same = MountRequest { digest: Some(prepared.digest.into()), ..other };
    prepared.plan(MountId::from_number(2), &same).unwrap();
    let with_area = MountRequest { virtual_bytes: 1 << 30, ..named };
    let refused = prepared.refusal(&with_area, ErrorKind::Invalid);
    assert!(refused.contains("which cannot be changed"), "{refused}");
    let both = SproutRequest {
        limit: Some(LIMIT_MIN),
        device: Some("/dev/null".into()),
        ..SproutRequest::default()
    };
    let refused =
        prepared.refusal(&request("image", WritesRequest::Kept(both)), ErrorKind::Invalid);
    assert!(refused.contains("--write-limit does not apply"), "{refused}");
}

#[test]
fn a_mount_that_fails_leaves_neither_writes_nor_their_lock() {
    let prepared = Prepared::new();
    let state = &prepared.state;
    let named = request("image", kept(Some("w")));
    let mut plan = prepared.plan(MountId::from_number(1), &named).unwrap();
    plan.reserve(state).unwrap();
    plan.undo(state);
    assert!(writes::find(state, "w").unwrap().is_none());
    assert!(!writes::folder(state, "w").join("sprout").exists());
    drop(plan);
    prepared.refusal(&request("other", kept(Some("w"))), ErrorKind::NotFound);
    drop(writes::take(state, "w").unwrap());
    // The leftovers of an interrupted mount are discarded.
    let folder = writes::folder(state, "w");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("sprout"), "no user's data").unwrap();
    let mut plan = prepared.plan(MountId::from_number(2), &named).unwrap();
    plan.reserve(state).unwrap();
    assert_eq!(fs::metadata(folder.join("sprout")).unwrap().len(), LIMIT_MIN);
}

#[test]
fn all_forms_of_an_oci_image_are_one_image_to_its_writes() {
    for name in ["sha256:00", "sha256:00/index", "sha256:00/contents", "sha256:00/3/toc"] {
        assert_eq!(image_of(name), "sha256:00");
    }
    for name in ["debian:12", "team/app:7", "url:00"] {
        assert_eq!(image_of(name), name);
    }
}
