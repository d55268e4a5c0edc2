//! One fsid per mount: patched nodes are valid, and corrupt ones are never repaired.

#![allow(clippy::unwrap_used, reason = "a test")]

mod common;

use burgeon_block::{ChecksumKind, ErrorKind};
use burgeon_btrfs::{
    Identity, NODE_SIZE, NodeSource, Patcher, SeedInfo, SeedOptions, check, patch_nodes,
};
use common::{Builder, FILE, IDENTITY, Seed, TEMPLATE, Template, get_u64, pattern};

const KINDS: [ChecksumKind; 2] = [ChecksumKind::Crc32c, ChecksumKind::Xxhash64];

fn seed(checksum: ChecksumKind) -> Seed {
    let mut builder = Builder::new();
    for n in 0..300 {
        builder.add(0, format!("name {n}"), FILE);
    }
    builder.file(0, "file", &pattern(1, 20_000));
    let options = SeedOptions { checksum, ..builder.options() };
    builder.seed(&options)
}

fn patched(seed: &Seed, identity: &Identity) -> Seed {
    let mut patched = seed.clone();
    for (piece, start) in patched.pieces.iter_mut().zip(Template::STARTS) {
        patch_nodes(&seed.info, identity, start, piece).unwrap();
    }
    patched
}

fn checksum_is_right(info: &SeedInfo, node: &[u8]) -> bool {
    let sum = info.checksum.of(&node[32..]).to_le_bytes();
    node[..info.checksum.size()] == sum[..info.checksum.size()]
}

#[test]
fn a_patched_seed_has_the_identity_of_its_mount() {
    for checksum in KINDS {
        let template = seed(checksum);
        let mount = patched(&template, &IDENTITY);
        check(&mount.info, &IDENTITY, &mount).unwrap();
        check(&mount.info, &TEMPLATE, &mount).expect_err("no template any more");
        // Removing the same fsid again gives the template back.
        let again = patched(&mount, &IDENTITY);
        assert!(again.pieces == template.pieces);
    }
}

/// The injected fault: a bit of the metadata file flips before patching.
#[test]
fn a_corrupt_node_stays_corrupt() {
    for checksum in KINDS {
        let template = seed(checksum);
        let flips = pattern(3, 8 * 3000);
        for flip in flips.chunks(8).map(|bytes| get_u64(bytes, 0)) {
            let start = Template::STARTS[(flip >> 60 & 1) as usize];
            let piece = &template.pieces[(flip >> 60 & 1) as usize];
            let at = (flip as usize % (piece.len() / NODE_SIZE)) * NODE_SIZE;
            let mut node = piece[at..at + NODE_SIZE].to_vec();
            // Bytes of the stored checksum field that the checksum kind does not use are not
            // covered.
            let byte = match (flip >> 20) as usize % NODE_SIZE {
                byte if byte >= checksum.size() && byte < 32 => byte % checksum.size(),
                byte => byte,
            };
            node[byte] ^= 1 << (flip >> 40 & 7);
            patch_nodes(&template.info, &IDENTITY, start + at as u64, &mut node).unwrap();
            assert!(!checksum_is_right(&template.info, &node), "{checksum}: bit {byte} is mended");
        }
    }
}

/// Every bit of the positions that patching writes to, where overwriting would repair it.
#[test]
fn a_flipped_bit_in_the_fsid_is_not_repaired() {
    for checksum in KINDS {
        let template = seed(checksum);
        let places = [32..48, NODE_SIZE - 16..NODE_SIZE, NODE_SIZE - 114..NODE_SIZE - 98];
        for bit in places.into_iter().flatten().flat_map(|byte| (0..8).map(move |b| (byte, b))) {
            let mut node = template.pieces[0][..NODE_SIZE].to_vec();
            node[bit.0] ^= 1 << bit.1;
            patch_nodes(&template.info, &IDENTITY, Template::STARTS[0], &mut node).unwrap();
            assert!(!checksum_is_right(&template.info, &node), "{checksum}: {bit:?} is mended");
        }
    }
}

#[test]
fn an_unwritten_node_stays_invalid() {
    for checksum in KINDS {
        let template = seed(checksum);
        for start in Template::STARTS {
            let mut node = vec![0; NODE_SIZE];
            patch_nodes(&template.info, &IDENTITY, start, &mut node).unwrap();
            assert!(!checksum_is_right(&template.info, &node));
        }
    }
}

#[test]
fn pieces_may_be_patched_in_any_order_and_size() {
    for checksum in KINDS {
        let template = seed(checksum);
        let whole = patched(&template, &IDENTITY);
        let patcher = Patcher::new(&template.info, &IDENTITY);
        for (piece, start) in Template::STARTS.into_iter().enumerate() {
            let nodes = template.pieces[piece].len() / NODE_SIZE;
            for index in (0..nodes).rev() {
                let at = start + (index * NODE_SIZE) as u64;
                let mut node = vec![0; NODE_SIZE];
                template.read(at, &mut node).unwrap();
                patcher.patch(at, &mut node).unwrap();
                assert!(node == whole.pieces[piece][index * NODE_SIZE..][..NODE_SIZE]);
            }
        }
    }
}

#[test]
fn only_whole_nodes_of_the_seed_are_patched() {
    let seed = seed(ChecksumKind::Crc32c);
    let [system, metadata] = Template::STARTS;
    let end = metadata + seed.pieces[1].len() as u64;
    let node = NODE_SIZE as u64;
    for (at, len) in [
        (0, node),
        (system - node, node),
        (system + 4096, node),
        (system, node / 2),
        (system + seed.pieces[0].len() as u64, node),
        (end - node, 2 * node),
        (end, node),
        (u64::MAX - 4095, node),
    ] {
        let mut nodes = vec![0; len as usize];
        let error = patch_nodes(&seed.info, &IDENTITY, at, &mut nodes).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{at} {len}");
    }
}
