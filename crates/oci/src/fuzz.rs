//! The parsers of hostile input in this crate, exposed to fuzz targets and memory tests only.

use burgeon_block::{ByteRange, Result};
use burgeon_image::builder::Listed;
use burgeon_source::registry::{ObjectBlobs, OciDigest};

use crate::{
    document::{
        Compression, DescriptorExt, Document, Layer, TocPlace, diff_ids, for_this_machine,
        index_artifact, referrer_digests, referrer_entries,
    },
    referrers,
    settings::ImageSettings,
    toc::{self, CompressedToc},
};

/// Offset of the TOC in the layer, and length of the layer.
const TOC_AT: u64 = 1 << 30;
const LAYER_LEN: u64 = 1 << 31;

/// Parses `bytes` as each document of an image: index, manifest, configuration, list of referrers,
/// Burgeon index, Burgeon image. Returns how many succeeded.
pub fn documents(bytes: &[u8]) -> usize {
    let document = Document::parse(bytes).map(|document| {
        if let Document::Index(all) = &document
            && let Ok(one) = for_this_machine(all)
        {
            let _ = (one.sha256(), one.document_size());
        }
    });
    let artifact = index_artifact(bytes).map(drop);
    let listed = referrer_entries(bytes).map(drop);
    let told = referrer_digests(bytes, "application/vnd.burgeon.index.v1", 8).map(drop);
    let config = diff_ids(bytes, 1).map(|_| {
        let _ = serde_json::from_slice(bytes).map(|config| ImageSettings::of(&config));
    });
    let ours = ObjectBlobs::decode(bytes).map(drop);
    [document, artifact, listed, told, config, ours].iter().filter(|read| read.is_ok()).count()
}

/// Number of Burgeon indexes on the pages of a list of referrers.
pub fn referrers_in(pages: &[Vec<u8>]) -> usize {
    referrers::digests_on(pages.iter().map(Vec::as_slice), "application/vnd.burgeon.index.v1").len()
}

/// Format of a TOC.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TocKind {
    /// eStargz: a gzip member with an archive that contains the TOC.
    Stargz,
    /// zstd:chunked: a zstd frame that unpacks to the TOC.
    Chunked,
}

/// Parses the TOC `stored`, which unpacks to `json` if it is valid.
pub fn toc(kind: TocKind, stored: Vec<u8>, json: &[u8]) -> Result<Vec<Listed>> {
    let at = ByteRange::at(TOC_AT, stored.len() as u64)
        .ok_or_else(|| toc::unusable("it is too long"))?;
    let (place, compression) = match kind {
        TocKind::Stargz => (TocPlace::Stargz { digest: OciDigest::of(json) }, Compression::Gzip),
        TocKind::Chunked => {
            let (digest, len) = (OciDigest::of(&stored), json.len() as u64);
            (TocPlace::Chunked { digest, stored: at, len }, Compression::Zstd)
        }
    };
    let (digest, size) = (OciDigest::of(b"layer"), LAYER_LEN);
    let layer = Layer { digest, size, compression, toc: None };
    toc::read(&layer, &place, &CompressedToc::new(stored, at)).map(|toc| toc.files)
}
