//! Images of ours in registries: pushed, copied by others' tools, mounted from there, pulled.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};
use testkit::{
    Burgeon, Fault, OciLayout, Proxy, Registry, Rng, Space, TokenGate, compare, skopeo_copy,
};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");
/// "user:hunter2" and "user:hunter3" in base 64.
const PASSWORDS: [&str; 2] = ["dXNlcjpodW50ZXIy", "dXNlcjpodW50ZXIz"];

/// A tree of several packs.
fn tree(space: &Space, seed: u64) -> PathBuf {
    let folder = space.path(&format!("tree-{seed}"));
    fs::create_dir_all(folder.join("sub")).unwrap();
    for n in 0..3 {
        let path = folder.join(format!("sub/big-{n}"));
        fs::write(path, Rng::new(seed + n).bytes(15_000_000)).unwrap();
    }
    for n in 0..20 {
        fs::write(folder.join(format!("file-{n}")), Rng::new(n).bytes(5000)).unwrap();
    }
    folder
}

fn small_tree(space: &Space) -> PathBuf {
    let folder = space.make_folder("small");
    fs::write(folder.join("data"), Rng::new(1).bytes(600_000)).unwrap();
    folder
}

fn said(burgeon: &Burgeon, arguments: &[&str]) -> Value {
    serde_json::from_str(&burgeon.ok(&[arguments, &["--json"]].concat())).unwrap()
}

/// The file that marks the only image of an installation as ready to be mounted, and its time.
fn ready(burgeon: &Burgeon) -> (PathBuf, std::time::SystemTime) {
    let folders = fs::read_dir(burgeon.state().join("images")).unwrap();
    let files: Vec<PathBuf> =
        folders.map(|folder| folder.unwrap().path().join("ready.json")).collect();
    let [file] = &files[..] else { panic!("{files:?}") };
    (file.clone(), fs::metadata(file).unwrap().modified().unwrap())
}

#[test]
fn a_pushed_image_is_mounted_copied_and_pulled() {
    let space = Space::new("push");
    let tree = tree(&space, 1);
    let maker = Burgeon::with_state(PROGRAM, space.path("maker"));
    maker.build(&tree, "app:7");
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    let proxy = Proxy::new(registry.address(), 2).unwrap();
    // Connections break, answers end early, the registry is overloaded: the push goes on.
    proxy.spoil(150, &[Fault::Reset, Fault::Truncate, Fault::Status(503), Fault::Status(429)]);
    let at = format!("oci://{}/team/app:7", proxy.address());
    let pushed = said(&maker, &["push", "app:7", &at]);
    proxy.spoil(0, &[]);
    let reference = pushed["reference"].as_str().unwrap();
    assert!(reference.contains("/team/app@sha256:"), "{reference}");
    assert!(pushed["new_bytes"].as_u64().unwrap() > 45_000_000, "{pushed}");
    // Once more: everything is there.
    let again = said(&maker, &["push", "app:7", &at]);
    assert_eq!((&again["reference"], &again["new_bytes"]), (&pushed["reference"], &json!(0)));

    // Another host mounts it, and fetches only the data that it reads.
    let user = Burgeon::with_state(PROGRAM, space.path("user"));
    user.ok(&["pull", &at]);
    let ready = ready(&user);
    let mounted = user.mount(&at, &space.path("at"), &["--read-only"]);
    assert_eq!(self::ready(&user), ready, "what was pulled is used");
    let faults = [Fault::Reset, Fault::Truncate, Fault::Status(503), Fault::Status(401)];
    proxy.spoil(100, &faults);
    compare(&tree, mounted.path()).unwrap().assert_same();
    proxy.spoil(0, &[]);
    user.umount(mounted);
    // As others copy it, it is the same.
    let cold = Burgeon::with_state(PROGRAM, space.path("cold"));
    let second = Registry::start(&space.path("second"), None).unwrap();
    let from = format!("docker://{}/team/app:7", registry.address());
    let to = format!("{}/copy/of:1", second.address());
    skopeo_copy(&[], &from, &format!("docker://{to}")).unwrap();
    let digest = reference.split_once('@').unwrap().1;
    let copy = format!("oci://{}/copy/of@{digest}", second.address());
    let mounted = cold.mount(&copy, &space.path("at"), &["--writes", "kept"]);
    compare(&tree, mounted.path()).unwrap().assert_same();
    fs::write(mounted.path().join("new"), "new").unwrap();
    cold.umount(mounted);
    let pulled = said(&cold, &["pull", "--eager", &format!("oci://{to}"), "--as", "mine"]);
    assert_eq!(pulled["complete"], json!(true));
    drop((proxy, registry, second));
    // All there is, is here.
    cold.ok(&["verify", "mine"]);
    fs::remove_dir_all(cold.state().join("images")).unwrap();
    fs::create_dir(cold.state().join("images")).unwrap();
    let mounted = cold.mount("mine", &space.path("at"), &["--read-only"]);
    compare(&tree, mounted.path()).unwrap().assert_same();
    cold.umount(mounted);
    let folder = space.make_folder("nowhere");
    cold.fails(&["mount", &at, folder.to_str().unwrap()], 5, "by its digest");
}

#[test]
fn credentials_travel_with_a_mount_and_are_looked_up_again() {
    let space = Space::new("push-login");
    let tree = small_tree(&space);
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    let gate = TokenGate::new(registry.address(), PASSWORDS[0], 1000).unwrap();
    let at = format!("oci://{}/app:1", gate.address());
    let config = |password: &str| {
        let host = gate.address();
        format!(r#"{{"auths": {{"{host}": {{"auth": "{password}"}}}}}}"#)
    };
    let docker = space.make_folder("docker");
    fs::write(docker.join("config.json"), "{}").unwrap();
    let made = |name: &str| {
        let burgeon = Burgeon::with_state(PROGRAM, space.path(name));
        burgeon.env("DOCKER_CONFIG", &docker).env("HOME", &docker)
    };
    let maker = made("maker");
    maker.build(&tree, "app");
    maker.fails(&["push", "app", &at], 5, "docker login");
    let maker = maker.env("DOCKER_AUTH_CONFIG", config(PASSWORDS[0]));
    maker.ok(&["push", "app", &at]);
    assert!(gate.scopes().iter().any(|scope| scope.contains("push")), "{:?}", gate.scopes());
    // A daemon that runs, whose environment has no credentials; those of the command are sent.
    let user = made("user");
    let other = space.make_folder("other");
    fs::write(other.join("text"), "text").unwrap();
    user.build(&other, "local");
    let local = user.mount("local", &space.path("local"), &["--read-only"]);
    let user = user.env("DOCKER_AUTH_CONFIG", config(PASSWORDS[0]));
    let mounted = user.mount(&at, &space.path("at"), &["--read-only"]);
    let kept: Vec<PathBuf> = fs::read_dir(user.state().join("mounts"))
        .unwrap()
        .map(|entry| entry.unwrap().path().join("access.json"))
        .filter(|path| path.exists())
        .collect();
    assert_eq!(kept.len(), 1);
    assert_eq!(fs::metadata(&kept[0]).unwrap().permissions().mode() & 0o777, 0o600);
    // The tokens that were given out expire.
    let tokens = gate.tokens();
    gate.change(PASSWORDS[0]);
    compare(&tree, mounted.path()).unwrap().assert_same();
    assert!(gate.tokens() > tokens);
    user.umount(mounted);
    user.umount(local);
    // A refused password is looked up again where the user may have renewed it.
    gate.change(PASSWORDS[1]);
    user.fails(&["pull", "--eager", &at], 5, "docker login");
    fs::write(docker.join("config.json"), config(PASSWORDS[1])).unwrap();
    user.ok(&["pull", "--eager", &at]);
    user.ok(&["verify", "app:1"]);
}

#[test]
fn a_refused_push_names_the_reason() {
    let space = Space::new("push-refused");
    let tree = small_tree(&space);
    let burgeon = Burgeon::new(PROGRAM, &space);
    burgeon.build(&tree, "app");
    burgeon.ok(&["build", "--by-reference", tree.to_str().unwrap(), "here"]);
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    let proxy = Proxy::new(registry.address(), 2).unwrap();
    let at = format!("oci://{}/app:1", proxy.address());
    let push =
        |image: &str, to: &str, code, said: &str| burgeon.fails(&["push", image, to], code, said);
    push("here", &at, 1, "--by-reference");
    push("none", &at, 3, "there is no image");
    push("app", "s3://bucket/x", 1, "oci://REGISTRY");
    push("app", &format!("{at}@sha256:{}", "0".repeat(64)), 1, "name a tag");
    for (fault, code, said) in [
        (Fault::Status(403), 5, "docker login"),
        (Fault::Status(507), 6, "no room"),
        (Fault::Status(413), 6, "refuses bodies of this size"),
        (Fault::Reset, 5, "cannot"),
    ] {
        proxy.spoil(1000, &[fault]);
        push("app", &at, code, said);
    }
    proxy.spoil(0, &[]);
    burgeon.fails(&["pull", &at], 3, "it does not exist (404)");
    // A pack that is damaged here does not get there.
    let packs = burgeon.state().join("store/packs");
    let pack = fs::read_dir(packs).unwrap().next().unwrap().unwrap().path();
    let mut bytes = fs::read(&pack).unwrap();
    bytes[1000] ^= 1;
    fs::write(&pack, bytes).unwrap();
    push("app", &at, 4, "does not match its name");
    burgeon.fails(&["pull", &at], 3, "it does not exist (404)");
    burgeon.fails(&["list", "--store", &at], 2, "burgeon push");
}

#[test]
fn a_repository_stands_in_the_place_of_a_store() {
    let space = Space::new("push-repository");
    let tree = small_tree(&space);
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    let repository = format!("oci://{}/team/app", registry.address());
    let maker = Burgeon::with_state(PROGRAM, space.path("maker")).option("--store");
    let maker = maker.option(&repository);
    let tree_path = tree.to_str().unwrap();
    let told = maker.ok(&["build", tree_path, "v1"]);
    assert!(told.contains("built v1") && told.contains(&format!("pushed v1 to {repository}:v1")));
    // Once more: its data is there, and only the time of the build has changed.
    let built = said(&maker, &["build", tree_path, "v1"]);
    let reference = built["reference"].as_str().unwrap();
    assert!(reference.starts_with(&format!("{repository}@sha256:")), "{built}");
    assert_eq!(built["new_bytes"], 0, "{built}");
    // An invalid tag is refused before anything is built.
    for name in ["app:1", "team/app"] {
        maker.fails(&["build", tree_path, name], 1, "cannot be a tag");
    }
    maker.fails(&["list"], 2, "has no digest");

    let user = Burgeon::with_state(PROGRAM, space.path("user"));
    let at = space.path("at");
    let mounted = user.mount("v1", &at, &["--read-only", "--store", &repository]);
    compare(&tree, &at).unwrap().assert_same();
    assert_eq!(user.status()["mounts"][0]["store"], reference);
    user.umount(mounted);
    user.ok(&["pull", "v1", "--eager", "--as", "app", "--store", &repository]);
    user.ok(&["verify", "app"]);
    let none = ["mount", "v2", at.to_str().unwrap(), "--store", &repository];
    user.fails(&none, 3, "it does not exist (404)");
}

/// The manifest of the only image in the layout `folder`, and its blobs with their types.
fn blobs(folder: &Path) -> (Value, Vec<(String, Vec<u8>)>) {
    let read = |digest: &Value| {
        let hex = digest.as_str().unwrap().strip_prefix("sha256:").unwrap().to_owned();
        fs::read(folder.join("blobs/sha256").join(hex)).unwrap()
    };
    let index: Value =
        serde_json::from_slice(&fs::read(folder.join("index.json")).unwrap()).unwrap();
    let manifest: Value = serde_json::from_slice(&read(&index["manifests"][0]["digest"])).unwrap();
    let layers = manifest["layers"].as_array().unwrap().iter();
    let blobs = layers
        .map(|layer| (layer["mediaType"].as_str().unwrap().to_owned(), read(&layer["digest"])));
    let blobs = blobs.collect();
    (manifest, blobs)
}

#[test]
fn forged_images_are_refused_and_an_index_gives_the_one_of_this_machine() {
    let space = Space::new("push-forged");
    let tree = tree(&space, 9);
    let maker = Burgeon::with_state(PROGRAM, space.path("maker"));
    maker.build(&tree, "app");
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    let host = registry.address();
    maker.ok(&["push", "app", &format!("oci://{host}/app:1")]);
    let layout = space.path("layout");
    skopeo_copy(&[], &format!("docker://{host}/app:1"), &format!("oci:{}:1", layout.display()))
        .unwrap();
    let (manifest, blobs) = blobs(&layout);
    let blobs: Vec<(&str, Vec<u8>)> =
        blobs.iter().map(|(kind, bytes)| (kind.as_str(), bytes.clone())).collect();
    let objects: Vec<String> = manifest["layers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|layer| layer["annotations"]["vnd.burgeon.object"].as_str().unwrap().to_owned())
        .collect();
    let of = |folder: &str| objects.iter().position(|object| object.starts_with(folder)).unwrap();
    let packs: Vec<usize> =
        (0..objects.len()).filter(|n| objects[*n].starts_with("packs/")).collect();
    assert!(packs.len() >= 2, "{objects:?}");
    let user = Burgeon::with_state(PROGRAM, space.path("user"));
    let mut number = 0;
    let forged = |change: &dyn Fn(&mut Value)| {
        let folder = space.path("forged");
        let _ = fs::remove_dir_all(&folder);
        let forge = |made: &mut Value| {
            made["artifactType"] = manifest["artifactType"].clone();
            made["mediaType"] = manifest["mediaType"].clone();
            for (layer, real) in made["layers"]
                .as_array_mut()
                .unwrap()
                .iter_mut()
                .zip(manifest["layers"].as_array().unwrap())
            {
                layer["annotations"] = real["annotations"].clone();
            }
            change(made);
        };
        OciLayout::by_hand(&folder, None, &blobs, forge).unwrap();
        folder
    };
    let mut pull = |change: &dyn Fn(&mut Value)| {
        let folder = forged(change);
        number += 1;
        let at = format!("{host}/forged:{number}");
        skopeo_copy(&[], &format!("oci:{}", folder.display()), &format!("docker://{at}")).unwrap();
        format!("oci://{at}")
    };
    let name = |number: usize, object: &str| {
        let object = object.to_owned();
        move |made: &mut Value| {
            made["layers"][number]["annotations"]["vnd.burgeon.object"] = object.clone().into();
        }
    };
    let refused = |at: &str, code, said: &str| user.fails(&["pull", "--eager", at], code, said);
    refused(&pull(&name(packs[0], "packs/../../../etc/passwd")), 4, "is not an object name");
    refused(&pull(&name(packs[0], "file/etc/passwd")), 4, "not a part of an image");
    refused(&pull(&name(packs[0], "packs/a/b")), 4, "not a part of an image");
    refused(&pull(&name(packs[0], &objects[packs[1]])), 4, "listed twice");
    refused(&pull(&name(packs[0], "images/other")), 4, "has 2 names");
    refused(&pull(&name(of("images/"), &format!("packs/{}", "0".repeat(64)))), 4, "has 0 names");
    refused(&pull(&name(of("manifests/"), &format!("manifests/{}", "0".repeat(64)))), 3, "missing");
    // Two packs, each under the name of the other.
    let swapped = |made: &mut Value| {
        let (a, b) = (packs[0], packs[1]);
        let kept = made["layers"][a]["annotations"].clone();
        made["layers"][a]["annotations"] = made["layers"][b]["annotations"].clone();
        made["layers"][b]["annotations"] = kept;
    };
    let swapped = pull(&swapped);
    refused(&swapped, 4, "does not match its name");
    // Mounted, no wrong byte comes through.
    let mounted = user.mount(&swapped, &space.path("at"), &["--read-only"]);
    for n in 0..3 {
        match fs::read(mounted.path().join(format!("sub/big-{n}"))) {
            Ok(bytes) => assert!(bytes == fs::read(tree.join(format!("sub/big-{n}"))).unwrap()),
            Err(error) => assert_eq!(error.raw_os_error(), Some(5)),
        }
    }
    user.umount(mounted);
    // One manifest for each platform: another's is never taken.
    let mine = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
    let whole = forged(&|_| ());
    let index: Value =
        serde_json::from_slice(&fs::read(whole.join("index.json")).unwrap()).unwrap();
    let entry = |architecture: &str| {
        let mut entry = index["manifests"][0].clone();
        entry["platform"] = json!({ "os": "linux", "architecture": architecture });
        entry
    };
    for (tag, platforms) in [("both", vec!["s390x", mine]), ("other", vec!["s390x"])] {
        let index = json!({ "schemaVersion": 2,
            "manifests": platforms.into_iter().map(entry).collect::<Vec<_>>(),
            "mediaType": "application/vnd.oci.image.index.v1+json" });
        let multi = space.path(tag);
        OciLayout::index_of(&whole, &multi, &index).unwrap();
        let to = format!("docker://{host}/multi:{tag}");
        skopeo_copy(&["--all"], &format!("oci:{}", multi.display()), &to).unwrap();
    }
    user.ok(&["pull", "--eager", &format!("oci://{host}/multi:both")]);
    user.ok(&["verify", "multi:both"]);
    refused(&format!("oci://{host}/multi:other"), 3, "only for linux/s390x");
    let from = format!("oci-layout:{}", layout.display());
    user.fails(&["build", &from, "x"], 1, "burgeon pull");
}

#[test]
fn a_push_to_an_address_where_nobody_listens_says_so() {
    let space = Space::new("push-nobody");
    let maker = Burgeon::with_state(PROGRAM, space.path("maker"));
    maker.build(&small_tree(&space), "app:7");
    // Nothing has port 1.
    let to = "oci://127.0.0.1:1/team/app:7";
    maker.fails(&["push", "app:7", to], 5, "is 127.0.0.1:1 its address?");
}
