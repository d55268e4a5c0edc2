//! The messages of `containerd.services.snapshots.v1`, by hand: a dozen messages do not need a
//! compiler of protocol files to build. The numbers are those of containerd's
//! `api/services/snapshots/v1/snapshots.proto` and `api/types/mount.proto`, and never change.
//! `snapshotter`, field 1 of each request, names a snapshotter of containerd and is not read here.

use std::collections::HashMap;

use prost_types::{FieldMask, Timestamp};

/// The path of every method begins with this.
pub const SERVICE: &str = "/containerd.services.snapshots.v1.Snapshots/";

/// A mount that containerd makes.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Mount {
    /// The type of the file system.
    #[prost(string, tag = "1")]
    pub kind: String,
    /// A device or a path.
    #[prost(string, tag = "2")]
    pub source: String,
    /// The path below the root.
    #[prost(string, tag = "3")]
    pub target: String,
    /// As of fstab.
    #[prost(string, repeated, tag = "4")]
    pub options: Vec<String>,
}

impl Mount {
    /// A mount at the root.
    pub fn new(kind: &str, source: &str, options: Vec<String>) -> Self {
        Self { kind: kind.into(), source: source.into(), target: String::new(), options }
    }
}

/// A request of `Prepare` and `View`.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct CreateRequest {
    /// The name of the new snapshot.
    #[prost(string, tag = "2")]
    pub key: String,
    /// A committed snapshot, or empty.
    #[prost(string, tag = "3")]
    pub parent: String,
    /// Labels of the new snapshot.
    #[prost(map = "string, string", tag = "4")]
    pub labels: HashMap<String, String>,
}

/// An answer of `Prepare`, `View` and `Mounts`.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct MountsResponse {
    /// In this order.
    #[prost(message, repeated, tag = "1")]
    pub mounts: Vec<Mount>,
}

/// A request of `Mounts`, `Remove`, `Stat` and `Usage`.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct KeyRequest {
    /// The name of a snapshot.
    #[prost(string, tag = "2")]
    pub key: String,
}

/// A request of `Commit`.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct CommitRequest {
    /// The new name.
    #[prost(string, tag = "2")]
    pub name: String,
    /// The active snapshot.
    #[prost(string, tag = "3")]
    pub key: String,
    /// Labels of the committed snapshot.
    #[prost(map = "string, string", tag = "4")]
    pub labels: HashMap<String, String>,
    /// Another parent than before, or empty.
    #[prost(string, tag = "5")]
    pub parent: String,
}

/// A snapshot as containerd sees it.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Info {
    /// Its key or name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Its parent, or empty.
    #[prost(string, tag = "2")]
    pub parent: String,
    /// 1 view, 2 active, 3 committed.
    #[prost(int32, tag = "3")]
    pub kind: i32,
    /// When it was made.
    #[prost(message, optional, tag = "4")]
    pub created_at: Option<Timestamp>,
    /// When it was changed last.
    #[prost(message, optional, tag = "5")]
    pub updated_at: Option<Timestamp>,
    /// Its labels.
    #[prost(map = "string, string", tag = "6")]
    pub labels: HashMap<String, String>,
}

/// An answer of `Stat` and `Update`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct InfoResponse {
    /// The snapshot.
    #[prost(message, optional, tag = "1")]
    pub info: Option<Info>,
}

/// A request of `Update`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct UpdateRequest {
    /// The name, and the new labels.
    #[prost(message, optional, tag = "2")]
    pub info: Option<Info>,
    /// The changed parts.
    #[prost(message, optional, tag = "3")]
    pub update_mask: Option<FieldMask>,
}

/// A request of `List`.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ListRequest {
    /// One of them has to match.
    #[prost(string, repeated, tag = "2")]
    pub filters: Vec<String>,
}

/// A part of the answer of `List`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ListResponse {
    /// Snapshots.
    #[prost(message, repeated, tag = "1")]
    pub info: Vec<Info>,
}

/// An answer of `Usage`.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct UsageResponse {
    /// Allocated bytes.
    #[prost(int64, tag = "1")]
    pub size: i64,
    /// Inodes.
    #[prost(int64, tag = "2")]
    pub inodes: i64,
}

/// A request or an answer without anything in it.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct Empty {}
