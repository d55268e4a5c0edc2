//! `burgeon inspect`: the parts of an image, down to the chunk of each piece.

use std::{
    io::{self, BufWriter, Write},
    process::ExitCode,
};

use anyhow::Result;
use burgeon_block::Digest;
use burgeon_image::{Manifest, ManifestLimits, Paths, catalog};
use serde_json::json;

use super::{Context, named, oci_facts};
use crate::{
    args,
    output::{self, bytes, counted},
};

pub(super) fn inspect(context: &Context, args: args::Inspect) -> Result<ExitCode> {
    let store = context.open_store()?;
    let record = named::resolve(context, &store, &args.name)?;
    let digest = record.digest()?;
    let manifest = catalog::load(&store, &digest, &ManifestLimits::default())?;
    if args.map {
        output::note(print_map(&manifest, context.json));
        return Ok(ExitCode::SUCCESS);
    }
    let facts = Facts::of(&manifest);
    let oci_images = oci_facts::known(context, &args.name, &record)?;
    if context.json {
        output::print_json(&json!({
            "image": record,
            "chunks": manifest.chunks.len(),
            "objects": manifest.objects.iter().map(|object| object.as_str()).collect::<Vec<_>>(),
            "checksum": manifest.checksum.to_string(),
            "directories": facts.directories,
            "files": facts.files,
            "symlinks": facts.symlinks,
            "others": facts.others,
            "xattrs": manifest.tree.xattrs.len(),
            "oci": oci_facts::to_json(&oci_images, &record),
        }))?;
        return Ok(ExitCode::SUCCESS);
    }
    let images = named::Images::of([record.clone()], &context.provenance());
    let title = images.title(&digest);
    println!("name        {title}");
    if title != record.name {
        println!("in store    {}", record.name);
    }
    println!("digest      {digest}");
    println!(
        "tree        {}, {}, {}, {}, {}",
        counted(facts.files, "file"),
        counted(facts.directories, "directory"),
        counted(facts.symlinks, "symlink"),
        counted(facts.others, "special file"),
        counted(manifest.tree.xattrs.len() as u64, "attribute")
    );
    println!("data        {}, as `du --apparent-size` counts", bytes(record.file_bytes));
    println!(
        "lazy data   {} in {}, deduplicated and padded to 4 KiB",
        bytes(record.data_bytes),
        counted(manifest.chunks.len() as u64, "chunk")
    );
    let stored = burgeon_oci::stored_bytes(&store, &record)?;
    let objects = counted(manifest.objects.len() as u64, "object");
    println!("stored      {} in {objects}", bytes(stored));
    println!("manifest    {} of that", bytes(record.manifest_bytes));
    println!("checksum    {}", manifest.checksum);
    for image in &oci_images {
        oci_facts::print(image, &record);
    }
    Ok(ExitCode::SUCCESS)
}

#[derive(Default)]
struct Facts {
    directories: u64,
    files: u64,
    symlinks: u64,
    others: u64,
}

impl Facts {
    fn of(manifest: &Manifest) -> Self {
        let mut facts = Self::default();
        for inode in &manifest.tree.inodes {
            let count = match inode.mode & 0o170_000 {
                0o040_000 => &mut facts.directories,
                0o100_000 => &mut facts.files,
                0o120_000 => &mut facts.symlinks,
                _ => &mut facts.others,
            };
            *count += 1;
        }
        facts
    }
}

/// One line for each piece of a file that lies in one chunk.
fn print_map(manifest: &Manifest, json: bool) -> io::Result<()> {
    let addresses = manifest.chunk_addresses();
    let paths = Paths::new(&manifest.tree);
    let mut out = BufWriter::new(io::stdout().lock());
    if json {
        // Written piece by piece: an image may have millions of them.
        write!(out, "{{\"map\":[")?;
    } else {
        writeln!(out, "# path\toffset\tlength\taddress\tchunk\tobject\tstored\tcodec\tdigest")?;
    }
    let mut first = true;
    for dirent in &manifest.tree.dirents {
        let inode = &manifest.tree.inodes[dirent.inode as usize];
        let mut path = None;
        let extents = manifest.tree.extents_of(inode).iter();
        let extents = extents.map(|extent| (extent.file_offset, extent.address, extent.len));
        for piece in pieces(manifest, &addresses, extents) {
            // Escapes odd bytes, so that each piece is one line.
            let path =
                path.get_or_insert_with(|| paths.of_dirent(dirent).escape_ascii().to_string());
            if json {
                write!(out, "{}{}", if first { "" } else { "," }, piece.to_json(path))?;
            } else {
                writeln!(out, "{}", piece.to_line(path))?;
            }
            first = false;
        }
    }
    if json {
        writeln!(out, "]}}")?;
    }
    out.flush()
}

/// Bytes of a file that lie in one chunk.
struct Piece<'a> {
    offset: u64,
    len: u64,
    address: u64,
    chunk: usize,
    object: &'a str,
    stored: (u64, u64),
    codec: &'static str,
    digest: Digest,
}

impl Piece<'_> {
    fn to_line(&self, path: &str) -> String {
        let Self { offset, len, address, chunk, object, codec, digest, stored } = self;
        format!(
            "{path}\t{offset}\t{len}\t{address}\t{chunk}\t{object}\t{}+{}\t{codec}\t{digest}",
            stored.0, stored.1
        )
    }

    fn to_json(&self, path: &str) -> serde_json::Value {
        json!({
            "path": path, "offset": self.offset, "length": self.len, "address": self.address,
            "chunk": self.chunk, "object": self.object, "stored_offset": self.stored.0,
            "stored_length": self.stored.1, "codec": self.codec, "digest": self.digest.to_string(),
        })
    }
}

/// Cuts a file's extents (offset in the file, address, length) at the borders of chunks.
fn pieces<'a>(
    manifest: &'a Manifest,
    addresses: &'a [u64],
    extents: impl Iterator<Item = (u64, u64, u64)>,
) -> Vec<Piece<'a>> {
    let mut pieces = Vec::new();
    for (file_offset, start, extent_len) in extents {
        let mut done = 0;
        while done < extent_len {
            let address = start + done;
            let chunk = addresses.partition_point(|start| *start <= address).saturating_sub(1);
            let (Some(entry), Some(end)) = (manifest.chunks.get(chunk), addresses.get(chunk + 1))
            else {
                break;
            };
            let len = (end - address).min(extent_len - done);
            pieces.push(Piece {
                offset: file_offset + done,
                len,
                address,
                chunk,
                object: manifest.objects.get(entry.object as usize).map_or("?", |o| o.as_str()),
                stored: (entry.stored.start(), entry.stored.len()),
                codec: match entry.codec {
                    burgeon_image::Codec::Raw => "raw",
                    burgeon_image::Codec::Zstd => "zstd",
                    burgeon_image::Codec::Verified => "verified",
                },
                digest: entry.digest,
            });
            done += len;
        }
    }
    pieces
}
