//! Slow devices and cache devices with sectors of 512 bytes and of 4 KiB, in every mode: requests
//! of each length that the device takes, compared byte by byte. Needs root.

#![allow(clippy::unwrap_used)]

mod slow;

use std::{
    fs::{self, File, OpenOptions},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
    process::Command,
};

use burgeon_block::Pages;
use rustix::fs::OFlags;
use slow::{Ends, MIB, PROGRAM, Slow, replace_server, run, status};
use testkit::{Burgeon, Rng, Space};

const MODES: [&str; 3] = ["write-around", "write-through", "write-back"];
/// Sectors of the longest request.
const LEN_MAX: u64 = 24;

#[test]
fn sectors_of_512_bytes_behind_a_cache_with_512() {
    compared(512, 512);
}

#[test]
fn sectors_of_512_bytes_behind_a_cache_with_4096() {
    compared(512, 4096);
}

#[test]
fn sectors_of_4096_bytes_behind_a_cache_with_512() {
    compared(4096, 512);
}

#[test]
fn sectors_of_4096_bytes_behind_a_cache_with_4096() {
    compared(4096, 4096);
}

fn compared(of_slow: u64, of_cache: u64) {
    let label = format!("sector-{of_slow}-{of_cache}");
    let space = Space::new(&label);
    let burgeon = Burgeon::new(PROGRAM, &space);
    let ends = Ends(&burgeon);
    // Of small sectors, the last block has not all.
    let len = 4 * MIB + if of_slow < 4096 { 5 * of_slow } else { 0 };
    let mut rng = Rng::new(of_slow << 16 | of_cache);
    let mut model = rng.bytes(len as usize);
    let image = space.path("slow");
    fs::write(&image, &model).unwrap();
    let below = slow::file_of(&space, "cache", 8);
    let [slow, cache] = [(&image, of_slow), (&below, of_cache)]
        .map(|(file, sector)| Slow::new(file, &["--sector-size", &sector.to_string()]));
    burgeon.ok(&["accelerate", "create", "fast", "--cache", cache.text(), "--log-size", "1M"]);
    for mode in MODES {
        let attach = ["accelerate", "attach", "fast", slow.text(), "--name", &label];
        let options = ["--mode", mode, "--policy", "clock", "--sequential-cutoff", "off"];
        let device = PathBuf::from(burgeon.ok(&[&attach[..], &options].concat()).trim());
        let size = |what: &str| -> u64 {
            run(Command::new("blockdev").arg(what).arg(&device)).trim().parse().unwrap()
        };
        assert_eq!((size("--getss"), size("--getsize64")), (of_slow, len));
        for step in 0..260 {
            request(&device, &mut rng, &mut model, of_slow);
            if step == 130 {
                replace_server(&burgeon);
            }
        }
        assert_eq!(status(&burgeon)["caches"][0]["state"], "good");
        burgeon.ok(&["accelerate", "check", &label]);
        let mut seen = vec![0; model.len()];
        File::open(&device).unwrap().read_exact_at(&mut seen, 0).unwrap();
        assert!(seen == model, "{mode}: the device differs");
        burgeon.ok(&["accelerate", "detach", &label]);
        assert!(fs::read(&image).unwrap() == model, "{mode}: the slow device differs");
    }
    burgeon.ok(&["accelerate", "destroy", "fast"]);
    drop(ends);
}

/// A read, a write or an erasure around the page cache, of whole sectors at any sector.
fn request(device: &Path, rng: &mut Rng, model: &mut [u8], sector: u64) {
    let direct = OFlags::DIRECT.bits() as i32;
    let file = OpenOptions::new().read(true).write(true).custom_flags(direct).open(device).unwrap();
    let sectors = model.len() as u64 / sector;
    // Often the same places, and those at the end.
    let first = match rng.below(4) {
        0 => sectors - 1 - rng.below(LEN_MAX),
        1 => rng.below(sectors),
        _ => rng.below(200),
    };
    let count = (1 + rng.below(LEN_MAX)).min(sectors - first);
    let (at, len) = (first * sector, (count * sector) as usize);
    let mut pages = Pages::zeroed(len as u64).unwrap();
    let bytes = &mut pages.bytes_mut()[..len];
    let known = &mut model[at as usize..at as usize + len];
    match rng.below(10) {
        0..4 => {
            file.read_exact_at(bytes, at).unwrap();
            assert!(bytes == known, "sectors {first} to {} differ", first + count);
        }
        4..9 => {
            known.copy_from_slice(&rng.bytes(len));
            bytes.copy_from_slice(known);
            file.write_all_at(bytes, at).unwrap();
            if rng.below(8) == 0 {
                file.sync_all().unwrap();
            }
        }
        _ => {
            let (at, len) = (at.to_string(), len.to_string());
            let zero = ["--zeroout", "--offset", &at, "--length", &len];
            run(Command::new("blkdiscard").args(zero).arg(device));
            known.fill(0);
        }
    }
}
