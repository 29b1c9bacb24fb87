set local lock_timeout = '500ms';

-- Finds the wait that a callback token is for.
create unique index if not exists awaits_callback_key on awaits (callback_hash) where callback_hash is not null;
