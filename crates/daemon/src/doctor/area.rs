//! Checks the virtual area of kept writes: its map, and the files needed to read mapped images.

use burgeon_block::Result;
use burgeon_image::{AddressMap, ExtentMap};

use super::{Finding, Level};
use crate::state::{
    images::{self, AREA},
    paths::StateDir,
    writes,
};

/// Checks the area of the writes `name`; `None` if they have none.
pub(super) fn examine(state: &StateDir, name: &str) -> Option<Finding> {
    writes::find(state, name).ok().flatten().filter(|record| record.virtual_bytes > 0)?;
    let area = writes::folder(state, name).join(AREA);
    let subject = format!("mapped into {name}");
    let verified = ExtentMap::open(&area).and_then(|map| Ok((map.verify()?, map)));
    let (unfinished, map) = match verified {
        Ok(verified) => verified,
        Err(e) => {
            let remedy = format!(
                "restore {} from a backup that is not older than the last `map`",
                area.display()
            );
            return Some(Finding::bad(
                Level::Problem,
                &subject,
                e.to_string(),
                "reads of the lost mappings are I/O errors, never wrong data",
                &remedy,
            ));
        }
    };
    if let Err(e) = check_images(state, &area, &map) {
        return Some(Finding::bad(
            Level::Problem,
            &subject,
            e.to_string(),
            "reads of that image are I/O errors",
            "map that image again, under any name, which makes the missing files; or restore \
             them from a backup",
        ));
    }
    // An unfinished mapping has no end yet.
    let mounted = writes::is_mounted(state, name).unwrap_or(true);
    if let (Some(label), false) = (unfinished.last(), mounted) {
        return Some(Finding::bad(
            Level::Warning,
            &subject,
            format!("unfinished mappings: {}, the last is {label}", unfinished.len()),
            "at most the mappings that it names, and their addresses",
            "a killed `burgeon map` leaves them, and nothing needs to be done; if their files \
             exist and give I/O errors, the map was truncated: restore it from a backup",
        ));
    }
    Some(Finding::fine(&subject, "the map is whole"))
}

/// Checks that every mapped image can be read, as far as this host's files are concerned.
fn check_images(state: &StateDir, area: &std::path::Path, map: &ExtentMap) -> Result<()> {
    for digest in map.images()? {
        let image = images::find(state, area, &digest)?;
        AddressMap::open(&image.map)?.verify()?;
    }
    Ok(())
}
