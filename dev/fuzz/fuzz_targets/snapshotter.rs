//! Records and filters of the snapshotter: any bytes are refused, or are a snapshot that encodes to
//! itself; any text is refused as a filter, or matches or not without panicking.

#![no_main]

use burgeon_snapshotter::{filter::Filter, record};
use libfuzzer_sys::fuzz_target;

const SAMPLE: &str = concat!(
    r#"{"id":7,"name":"default/7/sha256:ab","parent":"default/6/sha256:cd","kind":"committed","#,
    r#""labels":{"containerd.io/snapshot.ref":"sha256:ab"},"created":{"secs_since_epoch":1,"#,
    r#""nanos_since_epoch":2},"updated":{"secs_since_epoch":1,"nanos_since_epoch":2},"#,
    r#""usage":{"bytes":4096,"inodes":1}}"#
);

/// The record `body` with a sound digest.
fn sealed(body: &[u8]) -> Vec<u8> {
    let head = format!("burgeon snapshot 1 {}\n", burgeon_block::Digest::of(body));
    [head.as_bytes(), body].concat()
}

fuzz_target!(|input: &[u8]| {
    let sample = record::decode(&sealed(SAMPLE.as_bytes())).expect("the sample is sound");
    let mut edited = SAMPLE.as_bytes().to_vec();
    burgeon_fuzz::edits(&mut edited, input);
    let _ = record::decode(input);
    for body in [input, &edited] {
        if let Ok(snapshot) = record::decode(&sealed(body)) {
            let bytes = record::encode(&snapshot).expect("a snapshot encodes");
            assert_eq!(record::decode(&bytes).expect("and decodes"), snapshot);
        }
    }
    let text = String::from_utf8_lossy(input);
    let filters: Vec<_> = text.split('\n').map(str::to_owned).collect();
    if let Ok(filter) = Filter::parse(&filters) {
        filter.matches(&sample);
    }
});
