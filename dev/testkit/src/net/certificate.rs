//! Certificates that nobody trusts yet, made by `openssl`.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};

/// A certificate of a server, or of a client.
pub struct Certificate {
    /// The file with the certificate of the authority that has signed it.
    pub authority: PathBuf,
    /// The file with the certificate.
    pub certificate: PathBuf,
    /// The file with its key.
    pub key: PathBuf,
}

impl Certificate {
    /// One for the host `name`, of an authority of its own. Everything lies in the new folder
    /// `own`.
    pub fn new(own: &Path, name: &str) -> Result<Self> {
        fs::create_dir_all(own)?;
        let path = |file: &str| own.join(file);
        let config = format!(
            "[req]\ndistinguished_name = dn\n[dn]\n\
             [authority]\nbasicConstraints = critical, CA:TRUE\nsubjectKeyIdentifier = hash\n\
             [server]\nbasicConstraints = critical, CA:FALSE\nextendedKeyUsage = serverAuth, clientAuth\n\
             subjectAltName = DNS:{name}\n"
        );
        fs::write(path("config"), config)?;
        let (authority, authority_key) = (path("authority.pem"), path("authority.key"));
        let (certificate, key) = (path("certificate.pem"), path("certificate.key"));
        let make = |kind: &str, name: &str, key: &Path, to: &Path, signed_by: &[&Path]| {
            let mut command = Command::new("openssl");
            command.args(["req", "-x509", "-nodes", "-days", "2", "-newkey", "ec"]);
            command.args(["-pkeyopt", "ec_paramgen_curve:P-256", "-subj", &format!("/CN={name}")]);
            command.args(["-extensions", kind, "-config"]).arg(path("config"));
            command.arg("-keyout").arg(key).arg("-out").arg(to);
            for (option, file) in ["-CA", "-CAkey"].iter().zip(signed_by) {
                command.arg(option).arg(file);
            }
            let output = command.output().context("cannot run openssl: install it")?;
            ensure!(output.status.success(), "{command:?}: {output:?}");
            Ok(())
        };
        make("authority", "authority of a test", &authority_key, &authority, &[])?;
        make("server", name, &key, &certificate, &[&authority, &authority_key])?;
        Ok(Self { authority, certificate, key })
    }
}
