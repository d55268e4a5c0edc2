//! The messages of `containerd.services.diff.v1`, and those of `…content.v1` and `…leases.v1` that
//! a differ needs, by hand as in `api.rs`. The numbers are those of containerd's
//! `api/services/{diff,content,leases}/v1/*.proto`, and never change. Fields that are not read here
//! are left out.

use std::collections::HashMap;

use bytes::Bytes;
use prost_types::{FieldMask, Timestamp};

use crate::api::Mount;

/// The path of every method of the differ begins with this.
pub const DIFF: &str = "/containerd.services.diff.v1.Diff/";
/// The path of every method of the content store begins with this.
pub const CONTENT: &str = "/containerd.services.content.v1.Content/";
/// The path of every method of leases begins with this.
pub const LEASES: &str = "/containerd.services.leases.v1.Leases/";

/// A blob of a content store.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Descriptor {
    /// The type of its bytes.
    #[prost(string, tag = "1")]
    pub media_type: String,
    /// Its digest.
    #[prost(string, tag = "2")]
    pub digest: String,
    /// Its bytes.
    #[prost(int64, tag = "3")]
    pub size: i64,
}

/// A request of `Diff`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct DiffRequest {
    /// The tree before.
    #[prost(message, repeated, tag = "1")]
    pub left: Vec<Mount>,
    /// The changed tree.
    #[prost(message, repeated, tag = "2")]
    pub right: Vec<Mount>,
    /// The type of the wanted blob, or empty.
    #[prost(string, tag = "3")]
    pub media_type: String,
    /// The name of the write in the content store, or empty.
    #[prost(string, tag = "4")]
    pub reference: String,
    /// Labels of the blob.
    #[prost(map = "string, string", tag = "5")]
    pub labels: HashMap<String, String>,
    /// The latest time of an entry.
    #[prost(message, optional, tag = "6")]
    pub source_date_epoch: Option<Timestamp>,
}

/// An answer of `Diff`.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct DiffResponse {
    /// The written blob.
    #[prost(message, optional, tag = "3")]
    pub diff: Option<Descriptor>,
}

/// The step of a write that a [`WriteRequest`] asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WriteAction {
    /// Tells how far the write is.
    Stat = 0,
    /// Appends data.
    Write = 1,
    /// Ends the write.
    Commit = 2,
}

/// A message of `Write` to the content store.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct WriteRequest {
    /// A [`WriteAction`].
    #[prost(int32, tag = "1")]
    pub action: i32,
    /// The name of the write.
    #[prost(string, tag = "2")]
    pub reference: String,
    /// Bytes of the whole blob, or 0.
    #[prost(int64, tag = "3")]
    pub total: i64,
    /// The digest of the whole blob, or empty.
    #[prost(string, tag = "4")]
    pub expected: String,
    /// The place of the data.
    #[prost(int64, tag = "5")]
    pub offset: i64,
    /// A part of the blob.
    #[prost(bytes = "bytes", tag = "6")]
    pub data: Bytes,
    /// Labels of the blob.
    #[prost(map = "string, string", tag = "7")]
    pub labels: HashMap<String, String>,
}

/// A message of `Write` from the content store.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct WriteResponse {
    /// Bytes that it has.
    #[prost(int64, tag = "4")]
    pub offset: i64,
}

/// A request of `Abort`: of a write.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct AbortRequest {
    /// The name of the write.
    #[prost(string, tag = "1")]
    pub reference: String,
}

/// A request of `Info`: of a blob.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct InfoRequest {
    /// Its digest.
    #[prost(string, tag = "1")]
    pub digest: String,
}

/// A blob as the content store knows it.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ContentInfo {
    /// Its digest.
    #[prost(string, tag = "1")]
    pub digest: String,
    /// Its bytes.
    #[prost(int64, tag = "2")]
    pub size: i64,
    /// Its labels.
    #[prost(map = "string, string", tag = "5")]
    pub labels: HashMap<String, String>,
}

/// An answer of `Info`.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct InfoResponse {
    /// The blob.
    #[prost(message, optional, tag = "1")]
    pub info: Option<ContentInfo>,
}

/// A request of `Update`.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct UpdateRequest {
    /// The digest, and the new labels.
    #[prost(message, optional, tag = "1")]
    pub info: Option<ContentInfo>,
    /// The changed parts.
    #[prost(message, optional, tag = "2")]
    pub update_mask: Option<FieldMask>,
}

/// A request of `Create`: of a lease.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct LeaseRequest {
    /// Its name.
    #[prost(string, tag = "1")]
    pub id: String,
    /// Its labels.
    #[prost(map = "string, string", tag = "3")]
    pub labels: HashMap<String, String>,
}

/// A request of `AddResource`: a lease keeps something.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct AddResourceRequest {
    /// The lease.
    #[prost(string, tag = "1")]
    pub id: String,
    /// The kept thing.
    #[prost(message, optional, tag = "2")]
    pub resource: Option<Resource>,
}

/// Something that a lease keeps.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Resource {
    /// Its name: the digest of a blob.
    #[prost(string, tag = "1")]
    pub id: String,
    /// Its kind, such as `content`.
    #[prost(string, tag = "2")]
    pub kind: String,
}
