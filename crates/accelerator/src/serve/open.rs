//! Opening the cache, for the server: first the change that its supervisor asks for.

use std::fs::{self, File};

use burgeon_accelerate::{CacheStore, Dirty, Mode, Trust, policy::PolicyKind};
use burgeon_block::{Error, ErrorKind, Result};
use serde_json::{Value, json};

use super::take;
use crate::{
    dirty::{Owners, gone, record_distrust},
    disk::Disk,
    folder::CacheFolder,
    growth::grow,
    plan::{CacheChange, Plan, PlanDevice},
    replace::{is_unsettled, layout_of, replace},
};

/// The cache, and the result of the change that the plan asks for.
pub(super) fn open(
    plan: &Plan,
    policy: PolicyKind,
) -> Result<(CacheStore<Disk>, Option<Result<Value>>)> {
    let mut file = Disk::adopt(File::from(take(plan.cache_fd)), &plan.cache)?;
    let mut warm = plan.warm;
    let changed = match &plan.change {
        None => None,
        Some(CacheChange::Grow { size }) => {
            let grown = grow(&mut file, *size);
            Some(grown.map(|size| json!({ "cache": plan.cache, "size": size })))
        }
        Some(CacheChange::Replace { folder, cache, cache_fd, log_size }) => {
            let new = Disk::adopt(File::from(take(*cache_fd)), cache)?;
            let folder = CacheFolder::at(folder);
            match replaced(plan, &folder, (&file, &new), *log_size) {
                Ok(answer) => {
                    (file, warm) = (new, false);
                    Some(Ok(answer))
                }
                // Nobody knows which of the two a power failure leaves: neither is used.
                Err(error) if is_unsettled(&folder) => return Err(error),
                Err(error) => Some(Err(error)),
            }
        }
    };
    opened(plan, file, warm, policy).map(|store| (store, changed))
}

fn replaced(
    plan: &Plan,
    folder: &CacheFolder,
    (old, new): (&Disk, &Disk),
    log_size: Option<u64>,
) -> Result<Value> {
    let layout = layout_of(new.size(), log_size)?;
    let writes_back = |device: &PlanDevice| device.mode == Mode::WriteBack.name();
    if layout.log_blocks == 0
        && let Some(device) = plan.devices.iter().find(|device| writes_back(device))
    {
        let what = format!("the new cache has no log for write-back, which {} is in", device.name);
        return Err(Error::new(ErrorKind::Invalid, what));
    }
    replace(folder, old, new, layout)?;
    Ok(json!({ "cache": new.path(), "size": new.size() }))
}

fn opened(plan: &Plan, file: Disk, warm: bool, policy: PolicyKind) -> Result<CacheStore<Disk>> {
    let (size, path) = (file.size(), file.path().to_owned());
    let trust = if warm { Trust::Warm } else { Trust::Cold };
    let place = plan.distrust.clone();
    let distrust = Box::new(move |dirty: &[Dirty]| record_distrust(&place, dirty));
    let copy = file.descriptor()?;
    match CacheStore::open(file, size, trust, policy, distrust) {
        Ok(store) => {
            // Only here: nothing is served yet, so nobody can have recorded a newer failure.
            if plan.is_distrusted {
                // No mark has the writes since the failure.
                Owners::at(&plan.owners).note_changed()?;
                let _ = fs::remove_file(&plan.distrust);
            }
            Ok(store)
        }
        Err(error) if plan.goes_round => {
            let cache = path.display();
            tracing::error!(%cache, %error, "the cache cannot be opened: requests bypass it");
            let gone = match plan.is_distrusted {
                true => gone(&plan.distrust)?,
                false => Vec::new(),
            };
            record_distrust(&plan.distrust, &gone)?;
            CacheStore::failed(Disk::adopt(File::from(copy), &path)?, gone)
        }
        Err(error) => Err(Error::with_source(
            error.kind(),
            format!("cannot use the cache {}", path.display()),
            error,
        )),
    }
}
