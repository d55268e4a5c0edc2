//! Documents of registries and layouts: any bytes are refused or are an index, a manifest, a
//! configuration, a list of referrers, an index or an image of ours; nothing panics.

#![no_main]

use std::sync::LazyLock;

use burgeon_fuzz::edits;
use burgeon_oci::fuzz::documents;
use libfuzzer_sys::fuzz_target;

/// One of each kind.
static BASE: LazyLock<[String; 5]> = LazyLock::new(|| {
    let descriptor = |kind: &str, more: &str| {
        let digest = "0".repeat(64);
        format!(r#"{{"mediaType":"{kind}","digest":"sha256:{digest}","size":1234{more}}}"#)
    };
    let layer = "application/vnd.oci.image.layer.v1.tar";
    let pins = concat!(
        r#","annotations":{"io.github.containers.zstd-chunked.manifest-position":"8:9:10:1","#,
        r#""io.github.containers.zstd-chunked.manifest-checksum":"sha256:"#,
        "0000000000000000000000000000000000000000000000000000000000000000",
        r#""}"#
    );
    let platform = r#","platform":{"architecture":"amd64","os":"linux","variant":"v1"}"#;
    let config = descriptor("application/vnd.oci.image.config.v1+json", "");
    let layers = [descriptor(layer, ""), descriptor(&format!("{layer}+zstd"), pins)].join(",");
    let image = descriptor("application/vnd.oci.image.manifest.v1+json", platform);
    let artifact = r#","artifactType":"application/vnd.burgeon.index.v1""#;
    let referrer = descriptor("application/vnd.oci.image.manifest.v1+json", artifact);
    let object = r#","annotations":{"vnd.burgeon.object":"images/x"}"#;
    let object = descriptor("application/vnd.burgeon.name.v1+json", object);
    let ours = r#","artifactType":"application/vnd.burgeon.image.v1""#;
    let ours = format!(r#"{{"schemaVersion":2{ours},"config":{config},"layers":[{object}]}}"#);
    [
        format!(r#"{{"schemaVersion":2,"config":{config},"layers":[{layers}]}}"#),
        format!(r#"{{"schemaVersion":2,"manifests":[{image},{referrer}]}}"#),
        format!(r#"{{"rootfs":{{"type":"layers","diff_ids":["sha256:{}"]}}}}"#, "0".repeat(64)),
        format!(r#"{{"schemaVersion":2{artifact},"layers":[{layers}],"subject":{config}}}"#),
        ours,
    ]
});

fuzz_target!(|input: &[u8]| {
    assert!(BASE.iter().all(|base| documents(base.as_bytes()) > 0), "the samples are sound");
    let Some((how, rest)) = input.split_first() else { return };
    let bytes = match how {
        0 => rest.to_vec(),
        // A short input is a long list.
        1 => [b"{\"manifests\":[", &rest.repeat(2000)[..], b"0]}"].concat(),
        how => {
            let mut bytes = BASE[usize::from(how % 5)].clone().into_bytes();
            edits(&mut bytes, rest);
            bytes
        }
    };
    documents(&bytes);
});
