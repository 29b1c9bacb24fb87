//! One page of a list that is ordered by id, which is the order of creation.

use super::cursor::Cursor;
use super::error::{Error, FieldError};
use super::extract::{FromQuery, QueryReader};
use utoipa::IntoParams;
use uuid::Uuid;

const PAGE_DEFAULT: u32 = 50;
const PAGE_MAX: u32 = 100;

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
            cursor: query.optional("cursor", "text"),
            limit: query.limit(PAGE_DEFAULT, PAGE_MAX),
        }
    }
}

impl Page {
    /// The last row of the page before.
    pub fn after(&self, list: &str) -> Result<Option<Uuid>, Error> {
        let Some(text) = &self.cursor else {
            return Ok(None);
        };
        let cursor = Cursor::decode(text, list).ok_or_else(|| {
            let reason = "must be the next_cursor of another page of this list";
            Error::InvalidQuery(vec![FieldError::new("cursor", reason)])
        })?;
        Ok(Some(cursor.id))
    }

    /// Rows to read: one more than are shown, which tells whether there is a next page.
    pub fn wanted(&self) -> i64 {
        i64::from(self.limit) + 1
    }

    /// The rows to show, and the cursor of the next page if there is one.
    pub fn cut<T>(
        &self,
        list: &str,
        mut rows: Vec<T>,
        id: impl Fn(&T) -> Uuid,
    ) -> (Vec<T>, Option<String>) {
        let limit = self.limit as usize;
        let more = rows.len() > limit;
        rows.truncate(limit);
        let next = rows.last().filter(|_| more).map(|last| {
            Cursor {
                list: list.to_owned(),
                id: id(last),
                key: String::new(),
            }
            .encode()
        });
        (rows, next)
    }
}
