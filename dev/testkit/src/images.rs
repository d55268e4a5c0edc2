//! OCI images: made by the tools that others make them with, and wrong ones by hand.

use std::{
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::Estargz;

/// A folder with one image, in the OCI layout, with the tag `latest`.
pub struct OciLayout(PathBuf);

impl OciLayout {
    /// An image without layers, made by `umoci` in the new folder `folder`.
    pub fn new(folder: &Path) -> Result<Self> {
        let layout = Self(folder.to_owned());
        run("umoci", [OsStr::new("init"), OsStr::new("--layout"), folder.as_os_str()])?;
        run("umoci", ["new", "--image", &layout.image()])?;
        Ok(layout)
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.0
    }

    fn image(&self) -> String {
        format!("{}:latest", self.0.display())
    }

    /// Adds a layer with the changes of `change` to the unpacked image.
    pub fn change(&self, change: impl FnOnce(&Path)) -> Result<()> {
        let bundle = self.0.with_extension("bundle");
        change(&self.unpack(&bundle)?);
        let bundle_path = bundle.display().to_string();
        run("umoci", ["repack", "--image", &self.image(), &bundle_path])?;
        Ok(fs::remove_dir_all(&bundle)?)
    }

    /// Adds a layer that is the archive `tar`, as it is.
    pub fn add(&self, tar: &Path) -> Result<()> {
        let tar = tar.display().to_string();
        run("umoci", ["raw", "add-layer", "--image", &self.image(), &tar])
    }

    /// Unpacks the image with `umoci` in the new folder `bundle`; says where its root is.
    pub fn unpack(&self, bundle: &Path) -> Result<PathBuf> {
        let path = bundle.display().to_string();
        run("umoci", ["unpack", "--image", &self.image(), &path])?;
        Ok(bundle.join("rootfs"))
    }

    /// Writes an image of `layers` (media type and bytes) by hand into the folder `folder`, with
    /// `diff_ids` in its configuration, if any; `spoil` may change its manifest before that gets
    /// its digest.
    pub fn by_hand(
        folder: &Path,
        diff_ids: Option<&[&str]>,
        layers: &[(&str, Vec<u8>)],
        spoil: impl FnOnce(&mut Value),
    ) -> Result<()> {
        fs::create_dir_all(folder.join("blobs/sha256"))?;
        let write = |kind: &str, bytes: &[u8]| write_blob(folder, kind, bytes);
        let mut config = json!({ "architecture": "amd64", "os": "linux" });
        if let Some(ids) = diff_ids {
            config["rootfs"] = json!({ "type": "layers", "diff_ids": ids });
        }
        let config = config.to_string();
        let config = write("application/vnd.oci.image.config.v1+json", config.as_bytes())?;
        let layers = layers.iter().map(|(kind, bytes)| write(kind, bytes));
        let layers = layers.collect::<Result<Vec<_>>>()?;
        let mut manifest = json!({ "schemaVersion": 2, "config": config, "layers": layers });
        spoil(&mut manifest);
        let kind = "application/vnd.oci.image.manifest.v1+json";
        let manifest = write(kind, manifest.to_string().as_bytes())?;
        let index = json!({ "schemaVersion": 2, "manifests": [manifest] });
        fs::write(folder.join("index.json"), index.to_string())?;
        Ok(fs::write(folder.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#)?)
    }

    /// Writes an image of the folder `tree` whose one layer is in the format eStargz, cut every
    /// `chunk` bytes, so that its table of contents is enough to mount it. Returns its reference.
    pub fn listed(folder: &Path, tree: &Path, chunk: usize) -> Result<String> {
        let mut tar = Command::new("tar");
        let tar = tar.args(["--format=pax", "-c", "-C"]).arg(tree).arg(".").output()?;
        let layer = Estargz::new(&tar.stdout, chunk, |_| ())?;
        let gzip = "application/vnd.oci.image.layer.v1.tar+gzip";
        Self::by_hand(folder, None, &[(gzip, layer.blob)], |manifest| {
            let digest = json!({ "containerd.io/snapshot/stargz/toc.digest": layer.digest });
            manifest["layers"][0]["annotations"] = digest;
        })?;
        Ok(format!("oci-layout:{}", folder.display()))
    }

    /// Copies the layout `from` to the new folder `to`, where the only thing that has a name is
    /// `index`.
    pub fn index_of(from: &Path, to: &Path, index: &Value) -> Result<()> {
        run("cp", [OsStr::new("-r"), from.as_os_str(), to.as_os_str()])?;
        let index = write_blob(to, OCI_INDEX, index.to_string().as_bytes())?;
        let names = json!({ "schemaVersion": 2, "manifests": [index] });
        Ok(fs::write(to.join("index.json"), names.to_string())?)
    }
}

const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";

/// Writes a blob of a layout; gives its descriptor.
fn write_blob(folder: &Path, kind: &str, bytes: &[u8]) -> Result<Value> {
    let hex: String = Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect();
    fs::write(folder.join("blobs/sha256").join(&hex), bytes)?;
    Ok(json!({ "mediaType": kind, "digest": format!("sha256:{hex}"), "size": bytes.len() }))
}

/// Copies an image with `skopeo`, without asking registries for encryption.
pub fn skopeo_copy(options: &[&str], from: &str, to: &str) -> Result<()> {
    let before = ["--insecure-policy", "copy", "--src-tls-verify=false", "--dest-tls-verify=false"];
    run("skopeo", before.iter().chain(options).chain([&from, &to]))
}

fn run<A: AsRef<OsStr>>(program: &str, arguments: impl IntoIterator<Item = A>) -> Result<()> {
    let mut command = Command::new(program);
    let output = command.args(arguments).output();
    let output = output.with_context(|| format!("cannot run {program}: install it"))?;
    if !output.status.success() {
        bail!("{command:?} failed: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}

/// Makes an image of one layer in the new folder `folder`: a static busybox with its usual names,
/// users, and folders. `change` may change the configuration's settings. Returns its reference.
pub fn busybox_image(folder: &Path, change: impl FnOnce(&mut Value)) -> Result<String> {
    let program = ["/bin/busybox", "/usr/bin/busybox"].iter().map(Path::new).find(|it| it.exists());
    let program = program.context("cannot find busybox: install busybox-static")?;
    let mut tar = tar::Builder::new(Vec::new());
    let header = |kind: tar::EntryType, mode: u32, len: usize| {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_size(len as u64);
        header
    };
    for path in ["bin", "etc", "srv", "tmp", "data"] {
        let mode = if path == "tmp" { 0o1777 } else { 0o755 };
        tar.append_data(&mut header(tar::EntryType::Directory, mode, 0), path, &[][..])?;
    }
    let busybox = fs::read(program)?;
    let files: [(&str, u32, &[u8]); 3] = [
        ("bin/busybox", 0o755, &busybox),
        ("etc/passwd", 0o644, b"root:x:0:0::/root:/bin/sh\nwww:x:33:34::/srv:/bin/sh\n"),
        ("etc/group", 0o644, b"root:x:0:\nweb:x:34:\nmore:x:50:www\n"),
    ];
    for (path, mode, bytes) in files {
        let mut header = header(tar::EntryType::Regular, mode, bytes.len());
        tar.append_data(&mut header, path, bytes)?;
    }
    let names = "sh cat echo id ls pwd sleep test tr mknod wc kill touch rm mkdir hostname true mount ps stat";
    for name in names.split(' ') {
        let mut header = header(tar::EntryType::Symlink, 0o777, 0);
        tar.append_link(&mut header, format!("bin/{name}"), "busybox")?;
    }
    let layer = tar.into_inner()?;
    let digest: String = Sha256::digest(&layer).iter().map(|b| format!("{b:02x}")).collect();
    let mut settings = json!({});
    change(&mut settings);
    let config = json!({
        "architecture": std::env::consts::ARCH.replace("x86_64", "amd64").replace("aarch64", "arm64"),
        "os": "linux", "config": settings,
        "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{digest}")] },
    });
    fs::create_dir_all(folder.join("blobs/sha256"))?;
    let kind = "application/vnd.oci.image.config.v1+json";
    let config = write_blob(folder, kind, config.to_string().as_bytes())?;
    let layer = write_blob(folder, "application/vnd.oci.image.layer.v1.tar", &layer)?;
    let manifest = json!({ "schemaVersion": 2, "config": config, "layers": [layer] });
    let kind = "application/vnd.oci.image.manifest.v1+json";
    let manifest = write_blob(folder, kind, manifest.to_string().as_bytes())?;
    let index = json!({ "schemaVersion": 2, "manifests": [manifest] });
    fs::write(folder.join("index.json"), index.to_string())?;
    fs::write(folder.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#)?;
    Ok(format!("oci-layout:{}", folder.display()))
}
