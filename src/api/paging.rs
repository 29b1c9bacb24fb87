//! Pages of lists that are in order of creation: the cursor is the last id.

use super::cursor::Cursor;
use super::error::{Error, FieldError};
use super::extract::{FromQuery, QueryReader};
use utoipa::IntoParams;
use uuid::Uuid;

#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
pub struct Page {
    /// `next_cursor` of the page before.
    cursor: Option<String>,
    /// 1 to 100.
    #[param(default = 50, minimum = 1, maximum = 100)]
    limit: u32,
}

impl FromQuery for Page {
    fn from_query(query: &mut QueryReader) -> Self {
        Page {
            cursor: query.optional("cursor", "the next_cursor of another page of this list"),
            limit: query.limit(50, 100),
        }
    }
}

impl Page {
    /// The last id of the page before, which was one of `list`.
    pub fn after(&self, list: &str) -> Result<Option<Uuid>, Error> {
        let Some(text) = &self.cursor else {
            return Ok(None);
        };
        match Cursor::decode(text, list) {
            Some(cursor) => Ok(Some(cursor.id)),
            None => Err(Error::InvalidQuery(vec![FieldError::new(
                "cursor",
                "must be the next_cursor of another page of this list",
            )])),
        }
    }

    /// One more than a page holds, to see whether there are more.
    pub fn wanted(&self) -> i64 {
        i64::from(self.limit) + 1
    }

    /// Cuts what was read to a page, and names the next one.
    pub fn cut<T>(
        &self,
        items: &mut Vec<T>,
        list: &str,
        id: impl Fn(&T) -> Uuid,
    ) -> Option<String> {
        let more = items.len() > self.limit as usize;
        items.truncate(self.limit as usize);
        let last = items.last().filter(|_| more)?;
        let cursor = Cursor {
            list: list.to_owned(),
            id: id(last),
            key: String::new(),
        };
        Some(cursor.encode())
    }
}
