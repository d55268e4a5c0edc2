//! The test programs, parted into those of `make check` and the rest.

/// Test programs that need neither root nor a mount, apart from those with the name of one that
/// does.
pub(crate) const QUICK: [&str; 55] = [
    "accelerate",
    "accelerate_bugs",
    "area",
    "bombs",
    "catalog",
    "checksums",
    "claims",
    "concurrent",
    "config",
    "crashes",
    "derived",
    "device",
    "documented",
    "documents",
    "drives",
    "exchange",
    "extents",
    "failing_cache",
    "fill",
    "fixtures",
    "folder",
    "hostile",
    "hosts",
    "identities",
    "indexes",
    "injected_bugs",
    "interleavings",
    "layers",
    "manifest",
    "memory",
    "metadata",
    "model",
    "no_allocation",
    "owners",
    "patch",
    "places",
    "policy",
    "read_ahead",
    "records",
    "registry",
    "repeated",
    "restart",
    "rooms",
    "roundtrip",
    "shared_keys",
    "smartctl",
    "spoilt",
    "steps",
    "table",
    "tables",
    "tar",
    "troubleshooting",
    "volume",
    "work",
    "write_back",
];

/// All other test programs: they mount, need root or other programs, or take minutes.
#[cfg(test)]
const OTHERS: [&str; 94] = [
    "accelerated",
    "accelerated_units",
    "archives",
    "attributes",
    "backup",
    "bench",
    "btrfs",
    "build",
    "bundle",
    "cache",
    "cache_parts",
    "call_faults",
    "chain_ids",
    "chains",
    "check",
    "config_mount",
    "containerd",
    "deb",
    "demo",
    "density",
    "disks",
    "empty_chroot",
    "examples",
    "export",
    "fast",
    "health",
    "hit_path",
    "holders",
    "image_indexes",
    "index",
    "index_registry",
    "kernel",
    "kernel_corrupt",
    "kernel_equal",
    "kernel_hostile",
    "kernel_kill",
    "kernel_refuse",
    "kernel_tar",
    "kernel_writes",
    "kill",
    "kill_apart",
    "kill_calls",
    "kill_held",
    "kubelet_login",
    "kubernetes",
    "layouts",
    "let_go",
    "lifecycle",
    "listed",
    "low_memory",
    "map_image",
    "metrics",
    "mistakes",
    "mount_helper",
    "names",
    "namespace",
    "native",
    "oci_image",
    "opener",
    "own_user",
    "package",
    "paths",
    "pin",
    "pods",
    "pressure",
    "profile",
    "push",
    "reboot",
    "rebuilt",
    "remote",
    "rings",
    "roles",
    "run",
    "runtimes",
    "snapshotter",
    "snapshotter_full",
    "ssh_codes",
    "store",
    "systemd",
    "tar_foreign",
    "tls",
    "toc",
    "toc_shared",
    "torment",
    "trace",
    "transport",
    "ublk",
    "ublk_kill",
    "udev",
    "upgrade",
    "upgrade_from",
    "virtual_area",
    "watch",
    "writes",
    "written_back",
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{OTHERS, QUICK};

    #[test]
    fn every_test_program_is_in_one_list() {
        let root = crate::root();
        let folders = ["crates", "dev"].map(|folder| root.join(folder).read_dir().unwrap());
        let tests =
            folders.into_iter().flatten().map(|package| package.unwrap().path().join("tests"));
        let entries = tests.filter_map(|tests| tests.read_dir().ok()).flatten();
        let programs = entries.filter_map(|entry| {
            let path = entry.unwrap().path();
            let is_program = path.extension().is_some_and(|extension| extension == "rs")
                || path.join("main.rs").exists();
            is_program.then(|| path.file_stem().unwrap().to_str().unwrap().to_owned())
        });
        let programs: BTreeSet<String> = programs.collect();
        let listed: Vec<String> = QUICK.iter().chain(&OTHERS).copied().map(str::to_owned).collect();
        assert_eq!(programs, listed.iter().cloned().collect());
        assert_eq!(programs.len(), listed.len(), "one is in both lists");
    }
}
