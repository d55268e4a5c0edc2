//! Any bytes are refused or give a manifest that encodes to itself, makes a map, and from which
//! the seed writer makes a seed or refuses to; nothing panics or takes more memory than allowed.

#![no_main]

use std::sync::LazyLock;

use burgeon_block::Digest;
use burgeon_btrfs::{SeedOptions, Uuids, write_seed};
use burgeon_fuzz::{Nowhere, damaged, sample, unpacked};
use burgeon_image::{AddressMap, Manifest, ManifestLimits};
use libfuzzer_sys::fuzz_target;

static BASE: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let (packed, _) = sample().encode(1).expect("the sample encodes");
    let base = unpacked(&packed);
    assert_eq!(Manifest::decode(&base, &LIMITS).expect("the sample decodes"), sample_decoded());
    base
});

const LIMITS: ManifestLimits =
    ManifestLimits { bytes_max: 16 << 20, data_max: 1 << 40, items_max: 1 << 16 };

fn sample_decoded() -> Manifest {
    let (packed, _) = sample().encode(3).expect("the sample encodes");
    Manifest::decode(&packed, &LIMITS).expect("the sample decodes")
}

fuzz_target!(|input: &[u8]| {
    let Some(bytes) = damaged(&BASE, input) else { return };
    let Ok(manifest) = Manifest::decode(&bytes, &LIMITS) else { return };
    let (again, digest) = manifest.encode(1).expect("what decodes encodes");
    assert_eq!(Digest::of(&again), digest);
    assert!(Manifest::decode(&again, &LIMITS).expect("and decodes again") == manifest);
    let map = AddressMap::from_manifest(&manifest).expect("what decodes has a map");
    assert_eq!(map.data_range(), manifest.data_range());
    let uuids = Uuids::derive(&digest);
    let mut options = SeedOptions::new(manifest.data_range().end(), uuids);
    options.checksum = manifest.checksum;
    options.metadata_bytes_max = 64 << 20;
    let _ = write_seed(&manifest.tree, &manifest.block_checksums, &options, &Nowhere);
});
