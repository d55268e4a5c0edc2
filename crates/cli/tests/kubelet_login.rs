//! Logins by kubelet's credential provider plugins: for a mount, and again when a password has
//! ended.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    os::unix::fs::{FileExt, PermissionsExt},
    path::Path,
    process::Command,
};

use testkit::{Burgeon, OciLayout, Registry, RegistryOptions, Rng, Space, drop_caches};

use node::push_estargz_of;

mod node;

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");
const LARGE: usize = 8_000_000;

/// Lets `user` in with this password.
fn set_password(file: &Path, password: &str) {
    let made = Command::new("htpasswd").args(["-Bbn", "user", password]).output().unwrap();
    // By rename: the registry reads it whenever its time changes.
    let new = file.with_extension("new");
    fs::write(&new, made.stdout).unwrap();
    fs::rename(new, file).unwrap();
}

/// A plugin that notes its request and environment, and answers with what is in `answer`.
fn plugin(space: &Space, folder: &Path) {
    let at = folder.join("test-provider");
    let [request, answer, seen] = ["request", "answer", "environment"].map(|name| space.path(name));
    let script = format!(
        "#!/bin/sh\ncat > {}\nenv > {}\necho \"$1\" >> {}\ncat {}\n",
        request.display(),
        seen.display(),
        space.path("runs").display(),
        answer.display()
    );
    fs::write(&at, script).unwrap();
    fs::set_permissions(&at, fs::Permissions::from_mode(0o755)).unwrap();
}

fn answer(space: &Space, host: &str, password: &str) {
    let response = serde_json::json!({
        "kind": "CredentialProviderResponse",
        "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
        "cacheKeyType": "Registry",
        "auth": { host: { "username": "user", "password": password } },
    });
    fs::write(space.path("answer"), response.to_string()).unwrap();
}

/// kubelet's file with the plugin, for images that match.
fn providers(space: &Space, pattern: &str) {
    let text = format!(
        "apiVersion: kubelet.config.k8s.io/v1\nkind: CredentialProviderConfig\nproviders:\n\
         - name: test-provider\n  matchImages: ['{pattern}']\n  defaultCacheDuration: 12h\n  \
         apiVersion: credentialprovider.kubelet.k8s.io/v1\n  args: [get]\n  \
         env:\n  - {{name: PROFILE, value: node}}\n"
    );
    fs::write(space.path("providers.yaml"), text).unwrap();
}

#[test]
fn plugins_log_in_for_a_mount_and_again_when_a_password_has_ended() {
    let space = Space::new("kubelet-login");
    let layout = OciLayout::new(&space.path("layout")).unwrap();
    let large = Rng::new(5).bytes(LARGE);
    layout.change(|root| fs::write(root.join("large"), &large).unwrap()).unwrap();
    let blobs = space.path("registry");
    let open = Registry::start(&blobs, None).unwrap();
    let name = format!("{}/team/app:1", open.address());
    let pushed = push_estargz_of(&space, &layout, &name, "app", None);
    drop(open);
    let passwords = space.path("passwords");
    set_password(&passwords, "hunter2");
    let options = RegistryOptions { passwords: Some(&passwords), ..RegistryOptions::default() };
    let registry = Registry::with(&blobs, options).unwrap();
    let host = registry.address().to_string();
    let source = format!("oci://{host}/team/app@{}", pushed.digest);
    let folder = space.make_folder("plugins");
    plugin(&space, &folder);
    providers(&space, "127.*.0.1:1/team");
    answer(&space, &host, "hunter2");
    let config = space.path("config.toml");
    let write_config = |more: &str| {
        let file = space.path("providers.yaml");
        let text = format!("[registry]\nkubelet-providers = {:?}\n{more}", file.display());
        fs::write(&config, text).unwrap();
    };
    let empty = space.make_folder("empty");
    let burgeon = Burgeon::new(PROGRAM, &space)
        .option("--config")
        .option(&config)
        .env("DOCKER_CONFIG", &empty)
        .env("HOME", &empty)
        .env("AWS_SECRET_ACCESS_KEY", "of-a-bucket");
    let at = space.make_folder("at");
    let mount = ["mount", "--read-only", &source, at.to_str().unwrap()];
    write_config("");
    burgeon.fails(&mount, 1, "add registry.kubelet-provider-dir");
    write_config(&format!("kubelet-provider-dir = {:?}\n", folder.display()));
    // No plugin is for this image; one prints no response; the file is damaged.
    burgeon.fails(&mount, 5, "requires a login");
    assert!(!space.path("runs").exists());
    providers(&space, &format!("{host}/team"));
    fs::write(space.path("answer"), "hunter2").unwrap();
    let said = burgeon.run(&mount);
    assert!(said.stderr.contains("prints no CredentialProviderResponse"), "{said:?}");
    assert!(!said.stderr.contains("hunter2"), "{said:?}");
    fs::write(space.path("providers.yaml"), "kind: Pod\n").unwrap();
    let said = burgeon.run(&mount);
    assert!(said.stderr.contains("providers.yaml: is of the kind \"Pod\""), "{said:?}");
    // It matches, and its answer is right.
    providers(&space, &format!("{host}/team"));
    answer(&space, &host, "hunter2");
    let (mounted, said) = burgeon.mount_and_listen(&source, &at, &["--read-only"]);
    assert!(!said.contains("hunter2"), "{said}");
    let request: serde_json::Value =
        serde_json::from_slice(&fs::read(space.path("request")).unwrap()).unwrap();
    assert_eq!(request["kind"], "CredentialProviderRequest");
    assert_eq!(request["apiVersion"], "credentialprovider.kubelet.k8s.io/v1");
    assert_eq!(request["image"], format!("{host}/team/app"));
    let seen = fs::read_to_string(space.path("environment")).unwrap();
    assert!(seen.contains("PROFILE=node"), "{seen}");
    assert!(!seen.contains("of-a-bucket"), "it saw a secret of others: {seen}");
    // The password ends; the server gets the next one, and no reader notices.
    set_password(&passwords, "hunter3");
    answer(&space, &host, "hunter3");
    let runs = || fs::read_to_string(space.path("runs")).unwrap().lines().count();
    let before = runs();
    drop_caches();
    let file = fs::File::open(at.join("large")).unwrap();
    let mut found = vec![0; LARGE];
    file.read_exact_at(&mut found, 0).unwrap();
    assert!(found == large);
    assert!(runs() > before, "the plugin was not asked again");
    drop(file);
    burgeon.umount(mounted);
}
