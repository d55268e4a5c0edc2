//! `config.json` of an OCI runtime bundle (runtime specification 1.0.2).

use burgeon_oci::ImageSettings;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{
    defaults::{CAPABILITIES, FILE_SYSTEMS, MASKED, NETWORK_FILES, READ_ONLY, has_cgroup2},
    process::ContainerProcess,
};

/// The network of a container.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Network {
    /// That of this machine.
    Host,
    /// One of its own, without any interface to the outside.
    None,
}

/// The user's choices for a container.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ContainerOptions {
    /// Its network.
    pub network: Network,
    /// The root is read-only; the image's volumes are empty and writable.
    pub read_only: bool,
    /// Its standard streams are a terminal, which the runtime makes.
    pub terminal: bool,
    /// Its name in its own namespace.
    pub hostname: String,
}

/// The configuration of a bundle whose root is `rootfs`.
pub fn config(
    process: &ContainerProcess,
    settings: &ImageSettings,
    options: &ContainerOptions,
) -> Value {
    let names: Vec<&str> = CAPABILITIES.iter().map(|(name, _)| *name).collect();
    let mut namespaces = vec!["pid", "ipc", "uts", "mount"];
    if options.network == Network::None {
        namespaces.push("network");
    }
    let mut mounts: Vec<Value> = Vec::new();
    for it in &FILE_SYSTEMS {
        if it.kind == "cgroup2" && !has_cgroup2() {
            continue;
        }
        // Runtimes know both versions by this name.
        let kind = if it.kind == "cgroup2" { "cgroup" } else { it.kind };
        mounts.push(json!({
            "destination": it.target, "type": kind, "source": it.source, "options": it.options,
        }));
    }
    if has_cgroup2() {
        namespaces.push("cgroup");
    }
    if options.network == Network::Host {
        let exists = |path: &&&str| std::path::Path::new(path).exists();
        mounts.extend(NETWORK_FILES.iter().filter(exists).map(|path| {
            json!({
                "destination": path, "type": "bind", "source": path,
                "options": ["rbind", "ro", "nosuid", "nodev"],
            })
        }));
    }
    if options.read_only {
        mounts.extend(volumes(settings).map(|path| {
            json!({
                "destination": path, "type": "tmpfs", "source": "tmpfs",
                "options": ["nosuid", "nodev", "mode=755"],
            })
        }));
    }
    let user = &process.user;
    json!({
        "ociVersion": "1.0.2",
        "process": {
            "terminal": options.terminal,
            "user": { "uid": user.uid, "gid": user.gid, "additionalGids": user.groups },
            "args": process.args,
            "env": process.env,
            "cwd": process.cwd,
            "capabilities": { "bounding": names, "effective": names, "permitted": names },
            "rlimits": [{ "type": "RLIMIT_NOFILE", "hard": 1024, "soft": 1024 }],
            "noNewPrivileges": true,
        },
        "root": { "path": "rootfs", "readonly": options.read_only },
        "hostname": options.hostname,
        "mounts": mounts,
        "annotations": stop_signal(settings),
        "linux": {
            "namespaces": namespaces.iter().map(|kind| json!({ "type": kind })).collect::<Value>(),
            "maskedPaths": MASKED,
            "readonlyPaths": READ_ONLY,
            "resources": { "devices": [{ "allow": false, "access": "rwm" }] },
        },
    })
}

/// As the image specification translates it.
fn stop_signal(settings: &ImageSettings) -> Value {
    match &*settings.stop_signal {
        "" => json!({}),
        signal => json!({ "org.opencontainers.image.stopSignal": signal }),
    }
}

/// The image's volumes that are places below its root.
pub(crate) fn volumes(settings: &ImageSettings) -> impl Iterator<Item = &String> {
    let is_below = |path: &&String| {
        let mut parts = path.split('/').filter(|part| !part.is_empty());
        path.starts_with('/') && parts.clone().next().is_some() && parts.all(|part| part != "..")
    };
    settings.volumes.iter().filter(is_below)
}

#[cfg(test)]
mod tests {
    use burgeon_oci::ImageSettings;

    use super::{ContainerOptions, Network, config, volumes};
    use crate::{process::ContainerProcess, users::User};

    #[test]
    fn a_network_of_its_own_has_a_namespace_and_a_read_only_root_has_volumes() {
        let user = User { uid: 5, gid: 6, groups: vec![7], home: "/".into() };
        let process =
            ContainerProcess { args: vec!["sh".into()], env: vec![], cwd: "/srv".into(), user };
        let paths = ["/data", "/", "data", "/../etc", "/a/../../b", "//"].map(str::to_owned);
        let settings = ImageSettings {
            volumes: paths.to_vec(),
            stop_signal: "SIGQUIT".into(),
            ..ImageSettings::default()
        };
        assert_eq!(volumes(&settings).collect::<Vec<_>>(), ["/data"]);
        let config = |network, read_only| {
            let options =
                ContainerOptions { network, read_only, terminal: false, hostname: "h".into() };
            config(&process, &settings, &options)
        };
        let has = |config: &serde_json::Value, kind: &str| {
            let all = config["linux"]["namespaces"].as_array().unwrap();
            all.iter().any(|namespace| namespace["type"] == kind)
        };
        let (host, none) = (config(Network::Host, false), config(Network::None, true));
        assert!(!has(&host, "network") && has(&none, "network") && has(&host, "pid"));
        let mounts = |config: &serde_json::Value, target: &str| {
            let all = config["mounts"].as_array().unwrap();
            all.iter().filter(|mount| mount["destination"] == target).count()
        };
        assert_eq!([mounts(&host, "/data"), mounts(&none, "/data")], [0, 1]);
        assert_eq!(mounts(&none, "/etc/hosts"), 0);
        assert_eq!(none["root"]["readonly"], true);
        assert_eq!(none["process"]["user"]["additionalGids"][0], 7);
        assert_eq!(none["annotations"]["org.opencontainers.image.stopSignal"], "SIGQUIT");
    }
}
