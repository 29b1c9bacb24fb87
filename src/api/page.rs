//! One page of a list: where it begins, how long it is, and where the next one begins.

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
        Self::up_to(PAGE_MAX, query)
    }
}

impl Page {
    /// For lists that allow longer pages, and say so in their own parameters.
    pub fn up_to(limit_max: u32, query: &mut QueryReader) -> Self {
        Page {
            cursor: query.optional("cursor", "text"),
            limit: query.limit(PAGE_DEFAULT, limit_max),
        }
    }

    /// The last row of the page before.
    pub fn after(&self, list: &str) -> Result<Option<Uuid>, Error> {
        self.after_key(list, |id, _| Some(id))
    }

    /// The same in a list whose order takes more than an id. `read` makes a row's place of its id and key.
    pub fn after_key<P>(
        &self,
        list: &str,
        read: impl FnOnce(Uuid, &str) -> Option<P>,
    ) -> Result<Option<P>, Error> {
        let Some(text) = &self.cursor else {
            return Ok(None);
        };
        let place = Cursor::decode(text, list).and_then(|cursor| read(cursor.id, &cursor.key));
        let reason = "must be the next_cursor of another page of this list";
        place
            .map(Some)
            .ok_or_else(|| Error::InvalidQuery(vec![FieldError::new("cursor", reason)]))
    }

    /// Rows to read: one more than are shown, which tells whether there is a next page.
    pub fn wanted(&self) -> i64 {
        i64::from(self.limit) + 1
    }

    /// The rows to show, and the cursor of the next page if there is one.
    pub fn cut<T>(
        &self,
        list: &str,
        rows: Vec<T>,
        id: impl Fn(&T) -> Uuid,
    ) -> (Vec<T>, Option<String>) {
        self.cut_by_key(list, rows, |row| (id(row), String::new()))
    }

    /// The same for [`Page::after_key`].
    pub fn cut_by_key<T>(
        &self,
        list: &str,
        mut rows: Vec<T>,
        place: impl Fn(&T) -> (Uuid, String),
    ) -> (Vec<T>, Option<String>) {
        let limit = self.limit as usize;
        let more = rows.len() > limit;
        rows.truncate(limit);
        let next = rows.last().filter(|_| more).map(|last| {
            let (id, key) = place(last);
            let list = list.to_owned();
            Cursor { list, id, key }.encode()
        });
        (rows, next)
    }
}
