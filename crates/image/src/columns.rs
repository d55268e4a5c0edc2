//! Columns of numbers as byte planes.

use burgeon_block::Result;

use crate::corrupt;

/// Bytes of one row of columns with `widths`.
pub(crate) fn row_len(widths: &[usize]) -> u64 {
    widths.iter().sum::<usize>() as u64
}

/// Writes columns.
pub(crate) struct Writer {
    bytes: Vec<u8>,
    rows: usize,
    next: usize,
}

impl Writer {
    pub(crate) fn new(widths: &[usize], rows: usize) -> Self {
        Self { bytes: vec![0; widths.iter().sum::<usize>() * rows], rows, next: 0 }
    }

    /// The next column; the upper bytes of each value, beyond `width`, must be zero.
    pub(crate) fn column(&mut self, width: usize, values: impl Iterator<Item = u64>) {
        let planes = &mut self.bytes[self.next..self.next + width * self.rows];
        for (row, value) in values.enumerate() {
            debug_assert!(width == 8 || value >> (8 * width) == 0);
            for (plane, byte) in value.to_le_bytes().iter().take(width).enumerate() {
                planes[plane * self.rows + row] = *byte;
            }
        }
        self.next += width * self.rows;
    }

    pub(crate) fn finish(self) -> Vec<u8> {
        debug_assert_eq!(self.next, self.bytes.len());
        self.bytes
    }
}

/// Reads columns.
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
    rows: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8], rows: usize) -> Self {
        Self { bytes, rows }
    }

    /// The next column.
    pub(crate) fn column(&mut self, width: usize) -> Result<impl Iterator<Item = u64> + 'a> {
        let rows = self.rows;
        let Some((planes, rest)) = self.bytes.split_at_checked(width.saturating_mul(rows)) else {
            return Err(corrupt("a column is too short"));
        };
        self.bytes = rest;
        Ok((0..rows).map(move |row| {
            let mut value = [0; 8];
            for (plane, byte) in value.iter_mut().take(width).enumerate() {
                *byte = planes[plane * rows + row];
            }
            u64::from_le_bytes(value)
        }))
    }
}
