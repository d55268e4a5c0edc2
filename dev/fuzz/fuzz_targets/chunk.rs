//! Any bytes are refused or are the chunk whose digest was asked for; no bomb goes off.

#![no_main]

use burgeon_block::Digest;
use burgeon_image::{Codec, decode_chunk};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Some((blocks, stored)) = input.split_first() else { return };
    let mut raw = vec![0; usize::from(blocks % 64 + 1) * 4096];
    for codec in [Codec::Raw, Codec::Zstd, Codec::Verified] {
        let taken = decode_chunk(codec, stored, &mut raw, &Digest::of(b"another")).is_ok();
        // Those who give verified chunks have looked at them.
        assert!(!taken || codec == Codec::Verified);
        // The output has a digest of its own: with that one, the same bytes are good.
        let digest = Digest::of(&raw);
        if decode_chunk(codec, stored, &mut raw, &digest).is_ok() {
            assert_eq!(Digest::of(&raw), digest);
        }
    }
});
