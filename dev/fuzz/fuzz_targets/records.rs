//! Records of a store, which anybody who may write to the store has made: any bytes are refused, or
//! are the record of a name or of a host, whose digests are sound; nothing panics.

#![no_main]

use std::sync::LazyLock;

use burgeon_block::ObjectId;
use burgeon_fuzz::edits;
use burgeon_image::catalog::{HostRoots, ImageRecord};
use libfuzzer_sys::fuzz_target;

/// A record of a name, and one of a host.
static BASE: LazyLock<[Vec<u8>; 2]> = LazyLock::new(|| {
    let digest = "0".repeat(64);
    let name = format!(
        r#"{{"format":1,"name":"a","manifest":"{digest}","created_s":1,"inodes":1,"file_bytes":1,
        "data_bytes":1,"stored_bytes":1,"manifest_bytes":1}}"#
    );
    let host = format!(r#"{{"format":1,"host":"a","written_s":1,"manifests":["{digest}"]}}"#);
    assert!(of_name(name.as_bytes()).is_some() && of_host(host.as_bytes()).is_some());
    [name.into_bytes(), host.into_bytes()]
});

fn of_name(bytes: &[u8]) -> Option<ImageRecord> {
    ImageRecord::decode(bytes, &ObjectId::new("images/a").ok()?).ok()
}

fn of_host(bytes: &[u8]) -> Option<HostRoots> {
    HostRoots::decode(bytes).ok()
}

fuzz_target!(|input: &[u8]| {
    let Some((how, rest)) = input.split_first() else { return };
    let bytes = match how {
        0 => rest.to_vec(),
        how => {
            let mut bytes = BASE[usize::from(how % 2)].clone();
            edits(&mut bytes, rest);
            bytes
        }
    };
    assert!(of_name(&bytes).is_none_or(|record| record.digest().is_ok()));
    assert!(of_host(&bytes).is_none_or(|record| record.digests().is_ok()));
});
