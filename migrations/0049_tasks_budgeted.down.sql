set local lock_timeout = '500ms';

alter table tasks drop column budgeted;
