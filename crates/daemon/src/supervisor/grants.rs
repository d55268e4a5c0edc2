//! Grants: the files outside the state directory that the opener may open for a mount.
//!
//! ```text
//!   a profile is fetched while the mount is made ─┐
//!   the server is told of the mount ──────────────┼─► before that: grants/<id>   ─► opener
//!   content is mapped ────────────────────────────┘
//!   a new supervisor finds a mount without a record: an earlier version has made it
//! ```
//!
//! They follow from the request of a user, and from the image and the map that the user names. The
//! record is the supervisor's alone, so a server can add nothing to it while the mount lives.

use std::path::Path;

use burgeon_block::{ErrorKind, ObjectKind, Result};
use burgeon_image::{AddressMap, ExtentMap};
use burgeon_source::{
    Access, LayersAt, Location, Store, default_file_of_google, layers_at, registry::login_files,
};

use super::Supervisor;
use crate::{
    id::MountId,
    state::{
        access,
        grants::{self, Grants},
        images,
        paths::StateDir,
        record::{Attach, MountRecord, mount_ids, read_record},
    },
};

impl Supervisor {
    /// Allows `more` for the mount `id`. The record is there when this returns.
    pub(super) fn grant(&self, id: MountId, more: Grants) -> Result<()> {
        // For writers of records alone, which are small and not synced.
        let _one_writer = self.granting.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let known = match grants::find(&self.state, id) {
            Err(e) if e.kind() == ErrorKind::NotFound => None,
            found => Some(found?),
        };
        let mut all = known.clone().unwrap_or_default();
        all.add(more);
        match known.is_some_and(|known| known == all) {
            true => Ok(()),
            false => grants::publish(&self.state, id, &all),
        }
    }

    /// [`Self::grant`] for a mount that may end meanwhile.
    pub(super) fn grant_living(&self, id: MountId, more: Grants) -> Result<()> {
        self.grant(id, more)?;
        if !self.table().mounts.contains_key(&id) {
            grants::revoke(&self.state, id);
        }
        Ok(())
    }

    /// Servers of earlier versions opened the default credentials of Google's tools themselves.
    fn grant_google(&self, id: MountId, mut known: Grants) {
        let Ok(record) = read_record(&self.state, id) else { return };
        let Some(file) = default_file_of_google().filter(|_| record.attach.store.is_google())
        else {
            return;
        };
        known.credentials(&file);
        if let Err(e) = grants::publish(&self.state, id, &known) {
            tracing::warn!(mount = %id, error = %e, "the default credentials cannot be read");
        }
    }

    /// Allows the files of mounts that earlier versions have made, and forgets mounts that are
    /// gone. An existing record is kept, because a server may influence the files it was made from.
    pub(super) fn grant_recovered(&self) {
        let living = mount_ids(&self.state);
        grants::sweep(&self.state, &living);
        for id in living {
            match grants::find(&self.state, id) {
                Ok(known) => {
                    self.grant_google(id, known);
                    continue;
                }
                Err(e) if e.kind() == ErrorKind::NotFound => {}
                Err(e) => {
                    let path = self.state.grant(id);
                    tracing::error!(
                        mount = %id,
                        path = %path.display(),
                        error = %e,
                        "the record of a mount's files is made anew"
                    );
                    grants::revoke(&self.state, id);
                }
            }
            // A mount without its record is cleared up, or reported, where it is looked for.
            let Ok(record) = read_record(&self.state, id) else { continue };
            if let Err(e) = self.grant(id, of_record(&self.state, &record)) {
                tracing::error!(mount = %id, error = %e, "no files outside the state directory can be read for the mount");
            }
        }
    }
}

/// The grants of a mount, from its record and the files of credentials kept for it.
pub(super) fn of_record(state: &StateDir, record: &MountRecord) -> Grants {
    let access = access::kept(&state.mount(record.attach.id)).unwrap_or_default();
    of_mount(state, &record.attach, &access)
}

/// The grants of a mount that is to be served as `attach` says.
pub(super) fn of_mount(state: &StateDir, attach: &Attach, access: &Access) -> Grants {
    let mut grants = of_image(&attach.store, &attach.seed.join("map"), attach.references, access);
    attach.transport.device().into_iter().for_each(|number| grants.device(number));
    let Some(area) = &attach.area else { return grants };
    // Without its map an area has no content that could be read.
    if let Ok(map) = ExtentMap::open(area)
        && let Err(e) = map.each_file(&mut |object| grants.object(object))
    {
        tracing::warn!(mount = %attach.id, error = %e, "mapped files may be unreadable");
    }
    for image in images::list(state, area).unwrap_or_default() {
        let own = image.store.folder() == Some(&*state.store());
        grants.add(of_image(&image.store, &image.map, own, access));
    }
    grants
}

/// The grants for reading an image of `store` by its address `map`, with `references` also outside
/// the store. A damaged map is reported by the server, which cannot use it either.
pub(super) fn of_image(store: &Location, map: &Path, references: bool, access: &Access) -> Grants {
    let mut grants = Grants::default();
    let logins = |grants: &mut Grants| {
        login_files().iter().for_each(|file| grants.credentials(file));
    };
    access.for_location(store).files().for_each(|file| grants.credentials(file));
    match store {
        Location::Folder(folder) => grants.store(folder),
        Location::Registry(_) => logins(&mut grants),
        Location::Remote(_) if store.is_google() => {
            default_file_of_google().iter().for_each(|file| grants.credentials(file));
        }
        Location::Remote(_) => {}
    }
    if !references {
        return grants;
    }
    let Ok(map) = AddressMap::open(map) else { return grants };
    for object in map.objects() {
        grants.object(object);
        if !object.is(ObjectKind::Derived) {
            continue;
        }
        match Store::open(store, access).and_then(|store| layers_at(&store, object)) {
            Ok(LayersAt::Layout(folder)) => grants.store(&folder),
            Ok(LayersAt::Registry(_)) => logins(&mut grants),
            Err(error) => {
                tracing::warn!(%object, %error, "cannot find out where the image's layers are");
            }
        }
    }
    grants
}
