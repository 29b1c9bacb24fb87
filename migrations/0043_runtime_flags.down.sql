set local lock_timeout = '500ms';

drop table runtime_flags;
