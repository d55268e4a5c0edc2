//! Layers in the format eStargz, as `docs/estargz.md` of stargz-snapshotter describes it.

use std::io::{Cursor, Write};

use anyhow::{Context, Result};
use base64::{Engine, engine::general_purpose::STANDARD};
use flate2::{Compression, GzBuilder, write::GzEncoder};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tar::{Archive, EntryType, Header};

/// A layer of the format, and its table of contents.
pub struct Estargz {
    /// The layer.
    pub blob: Vec<u8>,
    /// Digest of the table, for the image's manifest.
    pub digest: String,
}

impl Estargz {
    /// Of the archive `tar`, whose files are cut every `chunk` bytes. `meddle` may change the
    /// table, which is then what the digest is of.
    pub fn new(tar: &[u8], chunk: usize, meddle: impl FnOnce(&mut Value)) -> Result<Self> {
        let mut layer = Writer { blob: Vec::new(), gzip: None };
        let (mut entries, mut done) = (Vec::new(), 0);
        let mut archive = Archive::new(Cursor::new(tar));
        for entry in archive.entries()? {
            let mut entry = entry?;
            let (start, size) = (entry.raw_file_position() as usize, entry.size() as usize);
            let mut listed = describe(&mut entry)?;
            layer.write(&tar[done..start])?;
            done = start;
            let name = listed["name"].clone();
            for at in (0..size).step_by(chunk) {
                let part = &tar[start + at..start + size.min(at + chunk)];
                listed["offset"] = layer.begin()?.into();
                listed["chunkDigest"] = sha256(part).into();
                listed["chunkOffset"] = at.into();
                if size > chunk {
                    listed["chunkSize"] = part.len().into();
                }
                layer.write(part)?;
                done = start + at + part.len();
                let next = json!({ "name": name.clone(), "type": "chunk" });
                entries.push(std::mem::replace(&mut listed, next));
            }
            if size == 0 {
                entries.push(listed);
            }
        }
        layer.write(&tar[done..done.next_multiple_of(512)])?;
        let mut table = json!({ "version": 1, "entries": entries });
        meddle(&mut table);
        let table = table.to_string().into_bytes();
        let start = layer.begin()?;
        let mut header = Header::new_ustar();
        header.set_path("stargz.index.json")?;
        header.set_size(table.len() as u64);
        header.set_entry_type(EntryType::Regular);
        header.set_cksum();
        layer.write(header.as_bytes())?;
        layer.write(&table)?;
        layer.write(&vec![0; table.len().next_multiple_of(512) - table.len() + 1024])?;
        layer.begin()?;
        // An empty member of gzip, whose extra field says where the table is.
        let mut footer = b"\x1f\x8b\x08\x04\0\0\0\0\0\xff\x1a\0SG\x16\0".to_vec();
        write!(footer, "{start:016x}STARGZ")?;
        footer.extend(b"\x01\0\0\xff\xff\0\0\0\0\0\0\0\0");
        layer.blob.extend(footer);
        Ok(Self { blob: layer.blob, digest: sha256(&table) })
    }
}

fn sha256(bytes: &[u8]) -> String {
    let hex: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

/// Members of gzip, one after another.
struct Writer {
    blob: Vec<u8>,
    gzip: Option<GzEncoder<Vec<u8>>>,
}

impl Writer {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let new = || GzBuilder::new().write(Vec::new(), Compression::fast());
        Ok(self.gzip.get_or_insert_with(new).write_all(bytes)?)
    }

    /// Begins another member; tells where.
    fn begin(&mut self) -> Result<u64> {
        if let Some(gzip) = self.gzip.take() {
            self.blob.extend(gzip.finish()?);
        }
        Ok(self.blob.len() as u64)
    }
}

/// The TOC's entry of a file, without the place of its data.
fn describe<R: std::io::Read>(entry: &mut tar::Entry<'_, R>) -> Result<Value> {
    let mut xattrs = serde_json::Map::new();
    let mut content = Vec::new();
    for extension in entry.pax_extensions()?.into_iter().flatten() {
        let extension = extension?;
        if let Some(name) = extension.key()?.strip_prefix("SCHILY.xattr.") {
            xattrs.insert(name.into(), STANDARD.encode(extension.value_bytes()).into());
        }
    }
    std::io::copy(entry, &mut content)?;
    let header = entry.header();
    let kind = match header.entry_type() {
        EntryType::Link => "hardlink",
        EntryType::Symlink => "symlink",
        EntryType::Char => "char",
        EntryType::Block => "block",
        EntryType::Directory => "dir",
        EntryType::Fifo => "fifo",
        _ => "reg",
    };
    let time = chrono::DateTime::from_timestamp(header.mtime()? as i64, 0).context("a time")?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let mut listed = json!({
        "name": text(&entry.path_bytes()), "type": kind, "mode": header.mode()?,
        "uid": header.uid()?, "gid": header.gid()?, "xattrs": xattrs,
        "modtime": time.format("%Y-%m-%dT%H:%M:%SZ").to_string(),
        "linkName": entry.link_name_bytes().map(|name| text(&name)).unwrap_or_default(),
    });
    if kind == "reg" {
        listed["size"] = content.len().into();
        listed["digest"] = sha256(&content).into();
    }
    if matches!(kind, "char" | "block") {
        listed["devMajor"] = header.device_major()?.into();
        listed["devMinor"] = header.device_minor()?.into();
    }
    Ok(listed)
}
