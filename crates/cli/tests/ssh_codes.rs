//! The recipe of `docs/operations.md` that guards ssh with one-time passwords: its two files, as
//! they are written there, in a real sshd on a port of its own. The server's `/etc` and `/run` are
//! its own, too: a mount namespace with a layer over those of this machine. Needs root, and the
//! Debian packages openssh-server, libpam-oath and oathtool.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    net::{TcpListener, TcpStream},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
};

use testkit::{PATIENCE, Space, wait_until};

const SECRET: &str = "3132333435363738393031323334353637383930";
const EMERGENCY: &str = "4142434445464748494a4142434445464748494a";

/// The lines of the page's code block whose first line names the file `path`.
fn of_the_page(path: &str) -> String {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/operations.md");
    let page = fs::read_to_string(page).unwrap();
    let head = format!("```\n# {path}\n");
    let (_, rest) = page.split_once(&head).unwrap_or_else(|| panic!("no {path} in the page"));
    rest.split_once("```").unwrap().0.to_owned()
}

fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    let output = output.unwrap_or_else(|e| panic!("{program}, of the Debian packages above: {e}"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {said}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// An sshd in a mount namespace of its own, which ends with the test.
struct Server<'a> {
    space: &'a Space,
    process: Child,
    port: u16,
    key: PathBuf,
}

impl Drop for Server<'_> {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl<'a> Server<'a> {
    fn start(space: &'a Space) -> Self {
        let folder = space.make_folder("server");
        let key = space.path("key");
        for file in [&key, &folder.join("host-key")] {
            let file = file.to_str().unwrap();
            run("ssh-keygen", &["-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", file]);
        }
        for (name, path) in
            [("sshd.conf", "/etc/ssh/sshd_config.d/50-codes.conf"), ("pam", "/etc/pam.d/sshd")]
        {
            fs::write(folder.join(name), of_the_page(path)).unwrap();
        }
        fs::write(folder.join("codes"), format!("HOTP/T30/6 alice - {SECRET}\n")).unwrap();
        fs::write(folder.join("emergency"), format!("HOTP/E/8 alice - {EMERGENCY}\n")).unwrap();
        // Alice needs codes. The user for backups is exempt; Bob is no administrator.
        let script = r#"
            set -e
            cd "$1"
            mount -t tmpfs tmpfs /run; mkdir -p /run/layer/upper /run/layer/work /run/sshd
            mount -t overlay -o lowerdir=/etc,upperdir=/run/layer/upper,workdir=/run/layer/work overlay /etc
            mkdir -p /etc/ssh/sshd_config.d
            cp sshd.conf /etc/ssh/sshd_config.d/50-codes.conf; cp pam /etc/pam.d/sshd
            install -m 600 codes /etc/security/codes
            install -m 600 emergency /etc/security/emergency-codes
            rm -f /etc/nologin /run/nologin
            groupadd burgeon-admins; groupadd no-codes
            for user in alice:burgeon-admins backup-user:burgeon-admins,no-codes bob:; do
                name=${user%%:*}
                useradd --no-create-home --home-dir "$1/$name" --shell /bin/sh --groups "${user#*:}" "$name"
                usermod --password '*' "$name"
                install -d -m 700 -o "$name" "$name" "$name/.ssh"
                install -m 600 -o "$name" "$2" "$name/.ssh/authorized_keys"
            done
            exec /usr/sbin/sshd -D -e -p "$3" -o ListenAddress=127.0.0.1 -h "$1/host-key" -o PidFile=none"#;
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let public = space.path("key.pub");
        // Users go through the folders to their homes.
        for folder in folder.ancestors().take_while(|folder| folder.parent().is_some()) {
            let mode = fs::metadata(folder).unwrap().permissions().mode();
            fs::set_permissions(folder, fs::Permissions::from_mode(mode | 0o011)).unwrap();
        }
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "bash", "-c", script, "sshd"]);
        command.arg(&folder).arg(public).arg(port.to_string()).stdin(Stdio::null());
        let log = fs::File::create(space.path("log")).unwrap();
        let process = command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap();
        let mut server = Self { space, process, port, key };
        let is_up = || {
            let ended = server.process.try_wait().unwrap();
            assert!(ended.is_none(), "{ended:?}: {}", server.log());
            TcpStream::connect(("127.0.0.1", port)).is_ok()
        };
        let mut is_up = is_up;
        assert!(wait_until(PATIENCE, &mut is_up));
        server
    }

    fn log(&self) -> String {
        fs::read_to_string(self.space.path("log")).unwrap()
    }

    /// A login, with the answers to its questions in their order; then empty ones.
    fn login(&self, user: &str, answers: &[&str]) -> Output {
        let [file, program] = ["answers", "ask"].map(|name| self.space.path(name));
        fs::write(&file, answers.iter().map(|line| format!("{line}\n")).collect::<String>())
            .unwrap();
        let text = "#!/bin/sh\nhead -n 1 \"$ANSWERS\"; sed -i 1d \"$ANSWERS\"\n";
        fs::write(&program, text).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o700)).unwrap();
        let mut ssh = Command::new("ssh");
        ssh.args([
            "-F",
            "none",
            "-o",
            "StrictHostKeyChecking=no",
            "-o",
            "UserKnownHostsFile=/dev/null",
        ]);
        ssh.args(["-o", "NumberOfPasswordPrompts=1", "-o", "IdentitiesOnly=yes", "-i"])
            .arg(&self.key);
        ssh.args(["-p", &self.port.to_string(), &format!("{user}@127.0.0.1"), "id -un"]);
        ssh.env("SSH_ASKPASS", program).env("SSH_ASKPASS_REQUIRE", "force").env("ANSWERS", file);
        ssh.env_remove("SSH_AUTH_SOCK").stdin(Stdio::null()).output().unwrap()
    }

    #[track_caller]
    fn lets_in(&self, user: &str, answers: &[&str]) {
        let output = self.login(user, answers);
        let said = String::from_utf8_lossy(&output.stdout);
        assert_eq!(said, format!("{user}\n"), "{answers:?}: {output:?}\n{}", self.log());
    }

    #[track_caller]
    fn refuses(&self, user: &str, answers: &[&str]) {
        let output = self.login(user, answers);
        let said = String::from_utf8_lossy(&output.stderr);
        let denied = said.contains("Permission denied") && output.stdout.is_empty();
        assert!(denied, "{user} {answers:?}: {output:?}\n{}", self.log());
    }

    /// Runs a program where the server runs.
    fn beside(&self, program: &[&str]) {
        let id = self.process.id().to_string();
        run("nsenter", &[&["--mount", "--target", &id], program].concat());
    }
}

#[test]
fn the_recipe_of_the_page_asks_administrators_for_codes() {
    let space = Space::new("ssh-codes");
    let server = Server::start(&space);
    let code = || run("oathtool", &["--totp", SECRET]);
    let emergency = run("oathtool", &["--hotp", "--digits=8", "--window=9", EMERGENCY]);
    let emergency: Vec<_> = emergency.lines().collect();
    assert_eq!(emergency.len(), 10);

    // By group, with exemptions.
    server.lets_in("bob", &[]);
    server.lets_in("backup-user", &[]);
    server.refuses("alice", &[]);
    let first = code();
    server.lets_in("alice", &[&first]);
    // No code is taken twice.
    server.refuses("alice", &[&first]);
    // An emergency code is taken in place of one, once, and voids those before it.
    server.lets_in("alice", &["", emergency[1]]);
    for used in [0, 1] {
        server.refuses("alice", &["", emergency[used]]);
    }
    // The success before has ended the count of failures; this is the third since.
    server.refuses("alice", &["000000"]);
    server.refuses("alice", &["", emergency[2]]);
    server.lets_in("bob", &[]);
    server.beside(&["faillock", "--user", "alice", "--reset"]);
    server.lets_in("alice", &["", emergency[3]]);
}
